"""What a schedule needs to know of one computation block of a kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx

from .tir import NotHandled, Rewriter, TensorLoad, is_guard, length_of, uses

SPATIAL, REDUCTION = 0, 2
_COSTLY = {
    "tirx.exp": 10,
    "tirx.exp2": 10,
    "tirx.rsqrt": 6,
    "tirx.sqrt": 6,
    "tirx.erf": 20,
    "tirx.tanh": 12,
    "tirx.sigmoid": 12,
    "tirx.log": 12,
    "tirx.log1p": 14,
    "tirx.sin": 40,
    "tirx.cos": 40,
    "tirx.pow": 60,
}


@dataclass
class Axis:
    """One iteration axis of a block."""

    var: Any
    kind: int
    extent: Any

    @property
    def length(self) -> int | None:
        """The extent where it is known at compile time."""
        return length_of(self.extent)


class _Summary(Rewriter):
    """Loads, size and cost of an expression."""

    def __init__(self) -> None:
        self.loads: list[Any] = []
        self.size = 0
        self.cost = 0
        self.branches = False

    def leave(self, node: Any) -> Any:
        self.size += 1
        kind = type(node)  # of none of these is a class derived
        if kind is TensorLoad:
            self.loads.append(node)
            self.cost += 1
        elif kind is tvm.ir.Call:
            name = getattr(node.op, "name", "")
            self.cost += _COSTLY.get(name, 4)
            self.branches = self.branches or is_guard(node)
        elif kind in (tirx.Div, tirx.Mod):
            self.cost += 4
        elif kind in (tirx.FloorDiv, tirx.FloorMod):
            self.cost += 2
        elif kind not in (tirx.IntImm, tirx.FloatImm, tvm.ir.Var):
            self.cost += 1
        return node


class Block:
    """A block with its axes, its single store (None where it is not that simple) and its loads."""

    def __init__(self, sch: Any, rv: Any):
        node = sch.get(rv)
        self.rv = rv
        self.name = str(node.name_hint)
        self.axes = [Axis(i.var, int(i.iter_type), i.dom.extent) for i in node.iter_vars]
        self.store = node.body if isinstance(node.body, tirx.BufferStore) else None
        self.reads = [r.source for r in node.reads]
        self.writes = [w.source for w in node.writes]
        self.summary = _Summary()
        if self.store is not None:
            try:
                self.summary.expr(self.store.value)
                for index in self.store.indices:
                    self.summary.expr(index)
            except NotHandled:
                self.store = None

    @property
    def reduces(self) -> bool:
        """Whether any axis is a reduction."""
        return any(a.kind == REDUCTION for a in self.axes)

    @property
    def regular(self) -> bool:
        """Whether it has only data-parallel and reduction axes and one store."""
        return self.store is not None and all(a.kind in (SPATIAL, REDUCTION) for a in self.axes)

    @property
    def work(self) -> float:
        """Rough cost of the whole block; infinite where a size is symbolic."""
        count = math.prod(a.length or math.inf for a in self.axes) if self.axes else 1
        return count * max(self.summary.cost, 2)

    def loads_of(self, buffer: Any) -> list[Any]:
        """The loads from one buffer."""
        return [x for x in self.summary.loads if x.source.same_as(buffer)]

    def operands(self) -> list[Any]:
        """The loads other than that of the accumulator."""
        assert self.store is not None
        return [x for x in self.summary.loads if not x.source.same_as(self.store.buffer)]


def leading(block: Block, buffer: Any) -> int:
    """How many leading dimensions of a buffer the block indexes by plain data-parallel axes.

    The axes must be the same ones, in the same order, in every access.
    """
    if block.store is None:
        return 0
    accesses = [x.indices for x in block.loads_of(buffer)]
    if block.store.buffer.same_as(buffer):
        accesses.append(block.store.indices)
    return min((len(row_axes(block, indices)) for indices in accesses), default=0)


def row_axes(block: Block, indices: Any) -> list[int]:
    """The block's axes that are, one each, the leading indices."""
    found: list[int] = []
    for index in indices:
        place = next(
            (
                n
                for n, a in enumerate(block.axes)
                if a.kind == SPATIAL and n not in found and isinstance(index, tvm.ir.Var)
                if index.same_as(a.var)
            ),
            None,
        )
        if place is None:
            break
        found.append(place)
    return found


def contiguous(block: Block, indices: Any, var: Any) -> bool:
    """Whether consecutive values of an axis touch consecutive elements."""
    if not indices or not unit_step(indices[-1], var):
        return False
    return not any(uses(i, var) for i in indices[:-1])


def unit_step(index: Any, var: Any) -> bool:
    if isinstance(index, tvm.ir.Var):
        return bool(index.same_as(var))
    if isinstance(index, (tirx.Add, tirx.Sub)):
        left, right = uses(index.a, var), uses(index.b, var)
        if left and not right:
            return unit_step(index.a, var)
        return right and not left and isinstance(index, tirx.Add) and unit_step(index.b, var)
    return False
