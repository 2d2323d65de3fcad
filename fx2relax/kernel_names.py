"""What the kernels of a program are called where a profiler shows them."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch.fx

from fx2relax.provenance import Site, Trail
from fx2relax.runtime.library import PREFIX

log = logging.getLogger("fx2relax")

# A chain of more nodes is named by its first ones.
_NODES = 12


def readable(site: Site, calls: Mapping[str, Any]) -> str:
    """What a reader calls a kernel.

    Args:
        site: where it is called.
        calls: the nodes that run in PyTorch, by the name of their packed function, which tells
            nobody anything.
    """
    call = calls.get(site.symbol)
    return str(call.op_name) if call is not None else site.symbol.removeprefix(PREFIX)


def computing(graph: torch.fx.GraphModule) -> list[str]:
    """The names of the nodes that compute anything, in order."""
    return [
        node.name
        for node in graph.graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem
    ]


def shown(
    told: Mapping[str, Any], legal: Any, grouped: Any, lowered: Any, ready: Any
) -> list[tuple[str, str]]:
    """What a program calls, in order: the symbol, and the name with the nodes that it computes.

    Args:
        told: what the importer tells of a graph, see `told.tell`.
        legal: the module before its kernels were grouped.
        grouped: after that.
        lowered: what `pipeline.lower` returned.
        ready: what machine code is made of.

    Returns:
        such as ``("fused_add_gelu", "fx2relax::fused_add_gelu [add, gelu]")``.
    """
    trail = Trail(told["name"], told["origins"], computing(told["graph"]))
    sites = trail.sites(told["mod"], legal, grouped, lowered, ready)
    return [(site.symbol, _name(site, told["torch_calls"])) for site in sites]


def _name(site: Site, calls: Mapping[str, Any]) -> str:
    nodes: Sequence[str] = site.nodes
    if len(nodes) > _NODES:
        nodes = [*nodes[:_NODES], f"{len(nodes) - _NODES} more"]
    return f"fx2relax::{readable(site, calls)} [{', '.join(nodes)}]"
