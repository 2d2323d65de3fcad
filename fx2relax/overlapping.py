"""Writes that AOTAutograd traces wrongly: where elements share memory, or beside an input."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from fx2relax.layouts import concrete, is_compact, overlaps

Node = torch.fx.Node

_IN_PLACE = {
    operator.setitem,
    operator.iadd,
    operator.iand,
    operator.ifloordiv,
    operator.ilshift,
    operator.imatmul,
    operator.imod,
    operator.imul,
    operator.ior,
    operator.ipow,
    operator.irshift,
    operator.isub,
    operator.itruediv,
    operator.ixor,
}


def overlapping_write(graph_module: torch.fx.GraphModule) -> Node | None:
    """The first node of a Dynamo graph that writes where elements of a view share memory.

    A graph without writes has each element apart: after the write some have the new value and
    others, which lie in the same place, the old one. Which of them stays is lost.
    """
    for module in graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                if any(_shares(target) for target in _written(node)):
                    return node  # type: ignore[no-any-return]
    return None


def write_beside(graph_module: torch.fx.GraphModule) -> Node | None:
    """The first write to memory of which an `as_strided` names elements that no input holds.

    A graph without writes has a new value for the input, and nothing for what lies beside it.
    """
    named = {storage for node in graph_module.graph.nodes if (storage := _named_beside(node))}
    for node in graph_module.graph.nodes if named else ():
        if any(_storage(target) in named for target in _written(node)):
            return node  # type: ignore[no-any-return]
    return None


def _named_beside(node: Node) -> int | None:
    """The storage of which an `as_strided` names elements that some input does not hold."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if not name.startswith("as_strided") or not node.all_input_nodes:
        return None
    storage = _storage(node.all_input_nodes[0])
    vals = [
        n.meta["example_value"]
        for n in node.graph.nodes
        if n.op == "placeholder" and storage is not None and _storage(n) == storage
    ]
    return None if all(_names_own(node, val, storage) for val in vals) else storage


def _names_own(node: Node, val: torch.Tensor, storage: int | None) -> bool:
    """Whether an input holds its storage from the start as far as a view of it reaches."""
    if concrete([val.storage_offset()]) != [0] or not is_compact(val):
        return False
    if _storage(node) != storage:  # a copy, which tells nothing of where its elements were
        nbytes = val.untyped_storage().nbytes()
        return bool(concrete([nbytes]) == [concrete([val.numel()])[0] * val.element_size()])
    view = node.meta["example_value"]
    steps = zip(concrete(view.shape), concrete(view.stride()), strict=True)
    reach = concrete([view.storage_offset()])[0] + sum((n - 1) * step for n, step in steps)
    return bool(reach < concrete([val.numel()])[0])


def _written(node: Node) -> Iterator[Node]:
    """The tensors that a node of a Dynamo graph writes to."""
    yield from _nodes(node.kwargs.get("out"))
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        for value, parameter in zip(node.args, target._schema.arguments, strict=False):
            if parameter.alias_info is not None and parameter.alias_info.is_write:
                yield from _nodes(value)
    elif node.args and (_in_place(node) or node.kwargs.get("inplace") is True):
        yield from _nodes(node.args[0])


def _in_place(node: Node) -> bool:
    if node.op == "call_function" and node.target in _IN_PLACE:
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op.startswith("call_") and name.endswith("_") and not name.endswith("__")


def _nodes(value: Any) -> list[Node]:
    return [v for v in pytree.tree_leaves(value) if isinstance(v, Node)]


def _shares(node: Node) -> bool:
    """Whether a tensor, or one that it is a view of, has elements in one place."""
    storage = _storage(node)
    if storage is None:
        return False
    seen, waiting = {node}, [node]
    while waiting:
        view = waiting.pop()
        if overlaps(view.meta["example_value"]):
            return True
        bases = {n for n in view.all_input_nodes if _storage(n) == storage} - seen
        seen |= bases
        waiting.extend(bases)
    return False


def _storage(node: Node) -> int | None:
    val = node.meta.get("example_value")
    if not isinstance(val, torch.Tensor) or val.layout is not torch.strided:
        return None
    try:
        return int(val.untyped_storage()._cdata)
    except NotImplementedError:  # a tensor that `torch.func` wraps
        return None
