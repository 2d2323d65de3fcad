"""One node of a graph, compiled alone."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from fx2relax import programs, stages
from fx2relax.graph_inputs import plain_specs
from fx2relax.options import Options
from fx2relax.runtime.program import Program

log = logging.getLogger("fx2relax")


def made_of(node: torch.fx.Node, inputs: Mapping[str, Any], library: str) -> Any:
    """What a node gives in a program of its own.

    Args:
        node: of an ATen graph, with its fake value in ``meta["val"]``; it draws no numbers.
        inputs: what it reads, by the names of the nodes that gave it.
        library: "torch" or "none", as for `torch.compile`.

    Returns:
        its value, nested as ``meta["val"]`` is; None where it cannot be compiled alone.
    """
    try:
        with stages.unobserved():
            return _run(node, inputs, library)
    except Exception as error:  # it is not known then whether it is right
        log.info("%s cannot be compiled alone: %s: %s", node.name, type(error).__name__, error)
        return None


def _run(node: torch.fx.Node, inputs: Mapping[str, Any], library: str) -> Any:
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    branches: dict[str, torch.nn.Module] = {}
    given: list[Any] = []
    for read in node.all_input_nodes:
        value = inputs[read.name]
        if isinstance(value, torch.nn.Module):  # a branch of `torch.cond`
            branches[str(read.target)] = value
            continue
        copies[read] = graph.placeholder(read.name)
        copies[read].meta["val"] = read.meta.get("val", value)
        given.append(value)
    for read in node.all_input_nodes:
        if read not in copies:
            copies[read] = graph.get_attr(str(read.target))
    made = graph.node_copy(node, copies.__getitem__)
    # A view of what it reads would be handed out as PyTorch's own, and not as the converter's.
    made.meta["val"] = pytree.tree_map_only(torch.Tensor, _apart, node.meta["val"])
    leaves, structure = pytree.tree_flatten(made.meta["val"])
    ends = [made]
    if isinstance(node.meta["val"], (tuple, list)):
        ends = []
        for index, leaf in enumerate(leaves):
            end = graph.call_function(operator.getitem, (made, index))
            end.meta["val"] = leaf
            ends.append(end)
    graph.output(tuple(ends))
    module = torch.fx.GraphModule(branches, graph)
    options = Options.make({"library": library, "cache": False}, None)
    specs = plain_specs(module)
    built = programs.build(module, specs, options)
    program = Program(built.imported, built.executable, None, built.calling)
    with torch.no_grad():
        results = program.call(tuple(given))
    return pytree.tree_unflatten(results, structure)


def _apart(value: torch.Tensor) -> torch.Tensor:
    """A fake tensor of the same kind whose storage is its own."""
    return value.new_empty_strided(value.shape, value.stride())
