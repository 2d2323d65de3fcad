"""Which line of the user's source, and which layer, a node comes from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch.fx

from fx2relax.explaining.report import Line

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<number>\d+)')


def line_of_trace(trace: str) -> Line:
    """The innermost line of a stack trace."""
    lines = [text.strip() for text in trace.strip().splitlines()]
    for place in range(len(lines) - 1, -1, -1):
        frame = _FRAME.search(lines[place])
        if frame is not None:
            code = lines[place + 1] if place + 1 < len(lines) else ""
            return Line(frame["file"], int(frame["number"]), code)
    return Line()


def lines(nodes: Sequence[torch.fx.Node], others: Sequence[torch.fx.Node]) -> dict[Any, Line]:
    """A line for each node.

    A node of a backward graph has that of the forward node whose gradient it is a part of; one
    that AOTAutograd added has that of the nearest node that it reads, or that reads it.

    Args:
        nodes: of one graph.
        others: of the graphs that were compiled before it.
    """
    numbered: dict[Any, Line] = {}
    for node in others:
        if node.meta.get("stack_trace") and "seq_nr" in node.meta:
            numbered.setdefault(node.meta["seq_nr"], line_of_trace(node.meta["stack_trace"]))
    found: dict[Any, Line] = {}
    for node in nodes:
        trace = node.meta.get("stack_trace") or node.meta.get("fwd_stack_trace")
        line = line_of_trace(trace) if trace else numbered.get(node.meta.get("seq_nr"), Line())
        if line.file:
            found[node] = line
    for ordered, near in (
        (nodes, lambda n: n.all_input_nodes),
        (list(reversed(nodes)), lambda n: list(n.users)),
    ):
        for node in ordered:
            known = [found[other] for other in near(node) if other in found]
            if node not in found and known:
                found[node] = known[-1]
    return found


def layer(node: torch.fx.Node) -> str:
    """The path of the innermost module that a node was made in; empty outside of all."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = re.sub(r"\._modules\[['\"]([^'\"]+)['\"]\]", r".\1", path)
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path)
    return re.sub(r"^(L\.)?\w+\.?", "", path, count=1) if path.startswith("L.") else path
