"""Schedules of a kernel's step without a sum: elementwise, broadcast, rearranged."""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx
from tvm.ir.prim import expr_deep_equal

from .blocks import Block, contiguous
from .loops import fuse, share, walk_together, walked_as_one, worth
from .tir import uses
from .transposes import TRANSPOSE

_CHUNK = 4096
_TILE = 16


def pointwise(sch: Any, block: Block, loops: dict[Any, Any], threads: int) -> list[Any]:
    """Flatten what all accesses walk alike, share the outer loops; returns what is left to mark."""
    assert block.store is not None
    axes = block.axes
    if not axes:
        return []
    if not contiguous(block, block.store.indices, axes[-1].var):
        share(sch, list(loops.values()), block, threads)
        return []
    if _alternates(block):
        _pairs(sch, block, loops, threads)
        return []
    strided = _strided_axis(block)
    if strided is not None:
        _transpose(sch, block, loops, strided, threads)
        return []
    flat = _flat_suffix(block)
    inner = fuse(sch, [loops[a.var] for a in axes[len(axes) - flat :]])
    outer = [loops[a.var] for a in axes[: len(axes) - flat]]
    if worth(block.work, threads):
        rows = math.prod(a.length or math.inf for a in axes[: len(axes) - flat])
        if rows < 4 * threads:
            inner_length = math.prod(a.length or math.inf for a in axes[len(axes) - flat :])
            chunk = _CHUNK
            if math.isfinite(inner_length * rows):
                part = math.ceil(inner_length * rows / threads / max(rows, 1))
                chunk = max(-(-part // 64) * 64, 256)
            shared, inner = sch.split(inner, [None, chunk])
            outer.append(shared)
        sch.parallel(fuse(sch, outer))
    return [inner]


def _alternates(block: Block) -> bool:
    """Whether every second element along the last axis is computed otherwise, as in pairs."""
    assert block.store is not None
    value, axis = block.store.value, block.axes[-1]
    if not isinstance(value, tirx.Select) or axis.length is None or axis.length % 2:
        return False
    zero, two = (tirx.const(n, axis.var.ty.dtype) for n in (0, 2))
    parity = axis.var if axis.length == 2 else tirx.FloorMod(axis.var, two)
    return bool(expr_deep_equal(value.condition, tirx.EQ(parity, zero)))


def _pairs(sch: Any, block: Block, loops: dict[Any, Any], threads: int) -> None:
    """Both elements of a pair at once; what is left of the loops is LLVM's to vectorise."""
    order = [loops[a.var] for a in block.axes]
    if block.axes[-1].length != 2:
        order[-1:] = sch.split(order[-1], [None, 2])
    sch.unroll(order.pop())
    if len(order) == 1 and worth(block.work, threads):
        order = list(sch.split(order[0], [None, _CHUNK]))
    share(sch, order[:-1], block, threads)


def _flat_suffix(block: Block) -> int:
    """How many trailing axes can be walked as one without a division in any index."""
    assert block.store is not None
    accesses = [list(block.store.indices), *(list(x.indices) for x in block.summary.loads)]
    return walked_as_one(block.axes, accesses)


def _strided_axis(block: Block) -> int | None:
    """The axis along which a load is contiguous while the store is not, for a transpose."""
    *outer, last = block.axes
    for load in block.summary.loads:
        if not any(uses(index, last.var) for index in load.indices):
            continue  # the same for the whole row
        for n, axis in enumerate(outer):
            if contiguous(block, load.indices, axis.var) and (axis.length or _TILE) >= 4:
                return n
    return None


def _joined(block: Block, last: int) -> int:
    """The first of the axes up to one that every access walks together with it."""
    assert block.store is not None
    accesses = [list(block.store.indices), *(list(x.indices) for x in block.summary.loads)]
    first = last
    while first > 0 and all(walk_together(block.axes[first - 1 : last + 1], i) for i in accesses):
        first -= 1
    return first


def _transpose(sch: Any, block: Block, loops: dict[Any, Any], strided: int, threads: int) -> None:
    """The loop along which memory is read around that along which it is written, marked."""
    axes = block.axes
    first = _joined(block, strided)
    others = [a for n, a in enumerate(axes[:-1]) if not first <= n <= strided]
    order = [loops[a.var] for a in others]
    rows = fuse(sch, [loops[a.var] for a in axes[first : strided + 1]])
    columns = loops[axes[-1].var]
    sch.reorder(*order, rows, columns)
    sch.annotate(rows, TRANSPOSE, 1)
    turns = math.prod(a.length or math.inf for a in others)
    share(sch, order if turns >= 2 * threads else [rows], block, threads)
