"""Schedules of sums and other reductions, and the loops that one thread runs for any step."""

from __future__ import annotations

import math
from typing import Any

from .blocks import REDUCTION, SPATIAL, Axis, Block, contiguous
from .cascade import CASCADE, TERMS
from .loops import fuse, walked_as_one, worth
from .shared_sums import SHARE
from .tir import length_of, uses
from .vector import REDUCE, VECTOR

_STRIP = 64
_WIDE = 1024  # sums that are added to side by side
_VECTOR = 8  # turns below which a sum is no vector


def reduction(sch: Any, block: Block, loops: dict[Any, Any], threads: int) -> None:
    """Share what is summed apart between the threads, or else the sum; vectorise along either."""
    spatial = [a for a in block.axes if a.kind == SPATIAL]
    shared = [loops[a.var] for a in spatial]
    keep = vector_axis(block, spatial)
    free = dict(loops)
    apart = math.prod(a.length or math.inf for a in spatial if a is not keep)
    if keep is not None:
        shared = [loops[a.var] for a in spatial if a is not keep]
        if apart < 4 * threads and worth(block.work, threads):
            chunk, free[keep.var] = sch.split(loops[keep.var], [None, _STRIP])
            shared.append(chunk)
            apart *= (keep.length or math.inf) / _STRIP
    parts = worth(block.work, threads) and apart <= threads / 2
    reduce = [free[a.var] for a in block.axes if a.kind == REDUCTION]
    kept = [] if keep is None else [free[keep.var]]
    sch.reorder(*shared, *reduce, *kept)
    if shared and not parts and worth(block.work, threads):
        sch.parallel(fuse(sch, shared))
    inside = {a.var: free[a.var] for a in block.axes if a.kind == REDUCTION or a is keep}
    inner(sch, block, inside, parts)


def summed(block: Block) -> list[Any]:
    """The loads that differ from one turn of the reduction to the next."""
    axes = [a.var for a in block.axes if a.kind == REDUCTION]
    return [x for x in block.operands() if any(uses(i, v) for i in x.indices for v in axes)]


def across(block: Block, axis: Axis) -> bool:
    """Whether what is summed lies along an axis that is kept, or sums are too short for vectors."""
    assert block.store is not None
    if any(contiguous(block, x.indices, axis.var) for x in summed(block)):
        return True
    reduce = [a for a in block.axes if a.kind == REDUCTION]
    turns = [a.length or _VECTOR for a in reduce[len(reduce) - _flat_reduction(block, reduce) :]]
    return math.prod(turns) < _VECTOR and contiguous(block, block.store.indices, axis.var)


def _strided(block: Block) -> bool:
    """Whether no load lies along the sum."""
    last = [a for a in block.axes if a.kind == REDUCTION][-1]
    return not any(contiguous(block, x.indices, last.var) for x in summed(block))


def vector_axis(block: Block, spatial: list[Axis]) -> Axis | None:
    """The axis of these to vectorise a reduction over, or None to vectorise the sum itself."""
    assert block.store is not None
    if not spatial:
        return None
    axis = spatial[-1]
    if axis.length is not None and axis.length < _VECTOR:
        return None
    if not contiguous(block, block.store.indices, axis.var):
        return None
    return axis if across(block, axis) or _strided(block) else None


def inner(sch: Any, block: Block, loops: dict[Any, Any], parts: bool = False) -> None:
    """Order and mark the loops that one thread runs for a block.

    Args:
        sch: the schedule.
        block: the step.
        loops: those of its axes that have more than one turn here.
        parts: whether the threads share a sum.
    """
    assert block.store is not None
    axes = [a for a in block.axes if a.var in loops]
    if not axes:
        return
    spatial = [a for a in axes if a.kind == SPATIAL]
    reduce = [a for a in axes if a.kind == REDUCTION]
    if not reduce:
        if contiguous(block, block.store.indices, axes[-1].var):
            sch.annotate(loops[axes[-1].var], VECTOR, 1)
        return
    keep = vector_axis(block, spatial)
    turns = [loops[a.var] for a in reduce]
    if keep is not None:
        outer = [loops[a.var] for a in spatial if a is not keep]
        along = loops[keep.var]
        if math.prod(a.length or math.inf for a in reduce) > TERMS and _is_wide(sch, along):
            chunk, along = sch.split(along, [None, _WIDE])
            outer.append(chunk)
        sch.reorder(*outer, *turns, along)
        sch.annotate(turns[0], CASCADE, 1)
        if parts:
            sch.annotate(turns[0], SHARE, 1)
        init = sch.decompose_reduction(block.rv, turns[0])
        sch.annotate(sch.get_loops(init)[-1], VECTOR, 1)
        sch.annotate(sch.get_loops(block.rv)[-1], VECTOR, 1)
        return
    if spatial:
        sch.reorder(*(loops[a.var] for a in spatial), *turns)
    flat = _flat_reduction(block, reduce)
    loop = fuse(sch, turns[len(turns) - flat :])
    first = turns[0] if flat < len(turns) else loop
    sch.annotate(loop, REDUCE, 1)
    if flat < len(turns):
        sch.annotate(first, CASCADE, 1)
    if parts:
        sch.annotate(first, SHARE, 1)
    sch.decompose_reduction(block.rv, first)


def _is_wide(sch: Any, loop: Any) -> bool:
    length = length_of(sch.get(loop).extent)
    return length is None or length > _WIDE


def _flat_reduction(block: Block, reduce: list[Any]) -> int:
    """How many trailing reduction axes every load walks as one."""
    return walked_as_one(reduce, [list(x.indices) for x in block.operands()])
