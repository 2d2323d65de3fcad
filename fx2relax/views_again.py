"""Results that AOTAutograd takes again as views of an input, where it needs their strides.

A result that shares memory with an input is made anew from it after a graph has run. Where sizes
that change are arguments of the view operators, PyTorch takes `as_strided` with the strides and the
offset of what the graph returned. The graph of an input that is written to returns a view of a copy
of it, and a copy may lie otherwise: PyTorch's own backends give wrong numbers then.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from fx2relax.graph_inputs import has_subclasses
from fx2relax.layouts import concrete

Node = torch.fx.Node


def of_inputs(graph: torch.fx.GraphModule, metadata: Any) -> None:
    """Let a graph return views of the inputs themselves, which lie as eager's do.

    Args:
        graph: AOTAutograd's, under its fake tensor mode; it is changed.
        metadata: AOTAutograd's, of the graph's inputs and results.
    """
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    plain = len(placeholders) == len(metadata.input_info) and not metadata.tokens
    if not plain or has_subclasses(metadata):
        return
    output = graph.graph.output_node()
    values: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for index, info in enumerate(metadata.output_info, len(metadata.mutated_inp_runtime_indices)):
        if info.output_type.name == "alias_of_input" and _by_strides(info.view_meta_sequence):
            values[index] = _again(graph.graph, values[index], placeholders[info.base_idx])
    output.args = (tuple(values),)


def _by_strides(sequence: Any) -> bool:
    """Whether PyTorch does not run the view operators again."""
    return sequence is None or any(view.has_symbolic_inputs for view in sequence.sequence)


def _again(graph: torch.fx.Graph, item: Any, source: Node) -> Any:
    """The view operators that made a result, on an input; the result where they are unclear."""
    steps: list[Node] = []
    base = item
    while isinstance(base, Node) and base is not source and _is_view(base):
        steps.append(base)
        base = base.args[0]
    if not steps or not isinstance(base, Node) or base is source or not _alike(base, source):
        return item
    made = source
    with graph.inserting_before(graph.output_node()):
        for step in reversed(steps):
            args, kwargs = (made, *step.args[1:]), dict(step.kwargs)
            made = graph.call_function(step.target, args, kwargs)  # type: ignore[arg-type]
            made.meta = dict(step.meta)
            known = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
            with torch.no_grad():
                made.meta["val"] = step.target(*known[0], **known[1])  # type: ignore[operator]
    return made


def _is_view(node: Node) -> bool:
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and _is_view(node.args[0])
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _alike(base: Node, source: Node) -> bool:
    """Whether one may stand for the other as what a view is taken of."""
    a, b = base.meta.get("val"), source.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return a.dtype == b.dtype and concrete(a.shape) == concrete(b.shape)
