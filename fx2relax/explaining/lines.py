"""Which line of the user's source, and which layer, a node comes from."""

from __future__ import annotations

import pydoc
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.fx

from fx2relax.explaining.report import Line

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<number>\d+)')
# What lies here is not the user's.
_OWN = [Path(str(torch.__file__)).parent, Path(__file__).parent.parent]


def line_of_trace(trace: str) -> Line:
    """The innermost line of a stack trace."""
    lines = [text.strip() for text in trace.strip().splitlines()]
    for place in range(len(lines) - 1, -1, -1):
        frame = _FRAME.search(lines[place])
        if frame is not None:
            code = lines[place + 1] if place + 1 < len(lines) else ""
            return Line(frame["file"], int(frame["number"]), code)
    return Line()


def lines(
    nodes: Sequence[torch.fx.Node], others: Sequence[torch.fx.Node], caller: Line
) -> dict[Any, Line]:
    """A line for each node.

    A node of a backward graph has that of the forward node whose gradient it is a part of. Dynamo
    tells none for what is called by PyTorch's own modules alone, as in a bare `nn.Sequential`: such
    a node has that of its module's `forward`, with the module's path and class. One that
    AOTAutograd added has that of the nearest node that it reads, or that reads it.

    Args:
        nodes: of one graph.
        others: of the graphs that were compiled before it.
        caller: where nothing else is known.
    """
    numbered: dict[Any, Line] = {}
    for node in others:
        if node.meta.get("stack_trace") and "seq_nr" in node.meta:
            numbered.setdefault(node.meta["seq_nr"], line_of_trace(node.meta["stack_trace"]))
    found: dict[Any, Line] = {}
    for node in nodes:
        trace = node.meta.get("stack_trace") or node.meta.get("fwd_stack_trace")
        line = line_of_trace(trace) if trace else numbered.get(node.meta.get("seq_nr"), Line())
        line = line if line.file else _line_of_module(node)
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
    return {node: found.get(node, caller) for node in nodes}


def line_of_caller() -> Line:
    """The innermost line that runs now and is neither ours nor PyTorch's."""
    for frame in reversed(traceback.extract_stack()):
        place = Path(frame.filename)
        own = any(place.is_relative_to(root) for root in _OWN)
        if not own and frame.lineno is not None:
            return Line(frame.filename, frame.lineno, frame.line or "")
    return Line()


def _line_of_module(node: torch.fx.Node) -> Line:
    """Where the `forward` of PyTorch's module begins that a node was made in, if it is one."""
    stack = _modules(node)
    kind = stack[-1][1] if stack else None
    if isinstance(kind, str):
        kind = pydoc.locate(kind)
    forward = getattr(kind, "forward", None)
    code = getattr(forward, "__code__", None)
    if code is None or not str(getattr(kind, "__module__", "")).startswith("torch."):
        return Line()
    name = str(getattr(kind, "__name__", ""))
    path = layer(node)
    return Line(code.co_filename, code.co_firstlineno, f"{path}: {name}" if path else name)


def _modules(node: torch.fx.Node) -> list[Any]:
    """The modules that a node was made in, from the outermost: their paths and classes."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return list(stack.values())


def layer(node: torch.fx.Node) -> str:
    """The path of the innermost module that a node was made in; empty outside of all."""
    stack = _modules(node)
    if not stack:
        return ""
    path = str(stack[-1][0])
    path = re.sub(r"\._modules\[['\"]([^'\"]+)['\"]\]", r".\1", path)
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path)
    return re.sub(r"^(L\.)?\w+\.?", "", path, count=1) if path.startswith("L.") else path
