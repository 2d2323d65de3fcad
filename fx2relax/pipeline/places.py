"""Indices in their shortest form, so that schedules see which loads lie along memory.

A reshape divides flat positions; within the bounds of a step's axes, most of that is the identity.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.ir import Range

from .tir import Call, NotHandled, Rewriter, TensorLoad, holds, with_body


def shorten(func: Any) -> Any:
    """A kernel of blocks with simplified indices; as it is where it holds an unknown node."""
    try:
        body = _Places().stmt(func.body)
    except NotHandled:
        return func
    return func if body is func.body else func.with_body(body)


class _Places(Rewriter):
    def __init__(self) -> None:
        self.bounds: Any = tvm.sym.Analyzer()

    def visit_SBlockRealize(self, node: Any) -> Any:
        block = node.block
        outer, self.bounds = self.bounds, tvm.sym.Analyzer()
        for axis in block.iter_vars:
            self.bounds.bind(axis.var, Range.from_min_extent(axis.dom.min, axis.dom.extent))
        body = self.stmt(block.body)
        init = None if block.init is None else self.stmt(block.init)
        self.bounds = outer
        if body is block.body and init is block.init:
            return node
        return with_body(node, body, init)

    def visit_BufferStore(self, node: Any) -> Any:
        node = self.store(node)
        indices = self.shortened(node.indices)
        return node if indices is None else tirx.BufferStore(node.buffer, node.value, indices)

    def leave(self, node: Any) -> Any:
        if not isinstance(node, TensorLoad):
            return node
        indices = self.shortened(node.indices)
        return node if indices is None else tirx.BufferLoad(node.source, indices)

    def shortened(self, indices: Any) -> list[Any] | None:
        """The indices simplified; None where nothing is to be gained."""
        new = [self.bounds.simplify(i) if _divides(i) else i for i in indices]
        return new if any(a is not b for a, b in zip(new, indices, strict=True)) else None


def _divides(index: Any) -> bool:
    """Whether an index divides, and depends on nothing but axes and sizes."""
    if holds(index, lambda part: isinstance(part, (TensorLoad, Call, tirx.Let))):
        return False
    return holds(index, lambda part: isinstance(part, (tirx.FloorDiv, tirx.FloorMod)))
