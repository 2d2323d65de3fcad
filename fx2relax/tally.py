"""What became of the graphs of this process: told to `fx2relax.stats`, the log and who looks on."""

from __future__ import annotations

import logging
import operator
from collections import Counter

import torch.fx

from fx2relax import report, stages
from fx2relax.alternatives import Alternatives
from fx2relax.drafts import Built
from fx2relax.errors import target_name

log = logging.getLogger("fx2relax")


def compiled(
    built: Built, phase: str, seconds: float, alternatives: Alternatives | None = None
) -> None:
    """Tell of a graph that was compiled, or found.

    Args:
        built: its program.
        phase: "inference", "forward" or "backward".
        seconds: what it took.
        alternatives: the programs of which this is one.
    """
    imported, census = built.imported, built.census
    # An assertion computes nothing that Relax would.
    calls = [c for c in imported.torch_calls.values() if c.val is not None and not c.library]
    report.counters.add_graph(
        nodes=imported.nodes,
        fallback=Counter(call.op_name for call in calls),
        seconds=seconds,
        relax_calls=imported.converted,
        tir_kernels=census["tir_kernels"],
        library_calls=census["library_calls"],
    )
    stages.note("compiled", seconds=seconds, alternatives=alternatives)
    log.info(
        "%s graph: %d nodes, of which %d run in PyTorch; %d kernels, %d library calls; %.2f s%s",
        phase,
        imported.nodes,
        sum(not call.library for call in imported.torch_calls.values()),
        census["tir_kernels"],
        census["library_calls"],
        seconds,
        ", found compiled" if built.found else "",
    )


def left_to_eager(graph: torch.fx.GraphModule, seconds: float) -> None:
    """Count a graph that runs in PyTorch, after so many seconds of trying."""
    nodes = Counter(
        target_name(n.target)
        for n in graph.graph.nodes
        if n.op.startswith("call_") and n.target is not operator.getitem
    )
    report.counters.add_graph(nodes=sum(nodes.values()), fallback=nodes, seconds=seconds)
