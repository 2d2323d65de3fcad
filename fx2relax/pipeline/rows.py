"""Schedules of kernels of several steps: each step for some rows of the output at a time."""

from __future__ import annotations

import math
from typing import Any

from .blocks import SPATIAL, Block, leading, row_axes
from .loops import fuse, worth
from .reduction import across, inner

_STRIP = 64  # elements of a row: whole lines of cache, and sums of them fit into registers
_LEAST = 32
_VECTOR = 16
_WIDE = 1024
_CACHED = 16384  # elements that several steps of a kernel read again


def common_rows(blocks: list[Block]) -> int:
    """How many leading dimensions every step of the kernel shares; 0 where they do not chain."""
    if len(blocks) < 2 or not all(b.regular for b in blocks):
        return 0
    buffers = [b.store.buffer for b in blocks[:-1] if b.store is not None]
    for n, buffer in enumerate(buffers):
        if not any(b.loads_of(buffer) for b in blocks[n + 1 :]):
            return 0  # a second output
    count = min(
        leading(b, buffer)
        for b in blocks
        for buffer in buffers
        if b.loads_of(buffer) or (b.store is not None and b.store.buffer.same_as(buffer))
    )
    last = blocks[-1]
    assert last.store is not None
    axes = row_axes(last, last.store.indices)[:count]
    lead = 0
    while lead < len(axes) and axes[lead] == lead:
        lead += 1
    return lead


def schedule_rows(sch: Any, blocks: list[Block], rows: int, threads: int) -> None:
    """Compute every step for one row of the output at a time, so that it stays in cache.

    Where the steps run along the last shared dimension, a strip of it takes the place of a row.
    """
    last = blocks[-1]
    work = sum(b.work for b in blocks)
    place = sch.get_loops(last.rv)[rows - 1]
    strips = in_strips(blocks, rows)
    if strips:
        turns = 4 * threads if worth(work, threads) else 1
        place, _ = sch.split(place, [None, _strip(blocks, rows, turns)])
    for block in reversed(blocks[:-1]):
        sch.compute_at(block.rv, place, preserve_unit_loops=True)
    outer = fuse(sch, sch.get_loops(last.rv)[:rows])
    if worth(work, threads):
        sch.parallel(outer)
    whole = rows - 1 if strips else rows
    for block in blocks:
        assert block.store is not None
        loops = sch.get_loops(block.rv)[1:]
        axes = block.axes[whole:] if block is last else block.axes
        if len(loops) != len(axes):
            raise ValueError(f"{block.name}: {len(loops)} loops for {len(axes)} axes")
        once = {block.axes[n].var for n in row_axes(block, block.store.indices)[:whole]}
        inside = {a.var: loop for a, loop in zip(axes, loops, strict=True) if a.var not in once}
        inner(sch, block, inside)


def in_strips(blocks: list[Block], rows: int) -> bool:
    """Whether vectors run along the last shared dimension, because no sum runs along memory."""
    reducing = [b for b in blocks if b.reduces]
    if not reducing:
        return rows == len(blocks[-1].axes)
    for block in reducing:
        assert block.store is not None
        axis = block.axes[row_axes(block, block.store.indices)[rows - 1]]
        long = axis.length is None or axis.length >= 8
        if long and across(block, axis):
            return True
    return False


def _strip(blocks: list[Block], rows: int, turns: int) -> int:
    """How long a strip is: within the cache, and short enough for so many turns of the rows."""
    last = blocks[-1]
    length = last.axes[rows - 1].length
    reducing = [b for b in blocks if b.reduces]
    size = _WIDE
    if len(blocks) > len(reducing) + 1 or len(reducing) > 1:
        summed = max(
            (math.prod(a.length or 1 for a in b.axes if a.kind != SPATIAL) for b in reducing),
            default=1,
        )
        size = min(max(_CACHED // max(summed, 1) // _STRIP * _STRIP, _STRIP), _WIDE)
    others = math.prod(a.length or math.inf for a in last.axes[: rows - 1])
    while length is not None and size > _STRIP and others * math.ceil(length / size) < turns:
        size //= 2
    return size if length is None else _whole(min(size, length), length)


def _whole(size: int, length: int) -> int:
    """A size of as much as possible of which a length is a multiple, unless that is little.

    Of a number of turns that it does not know, LLVM makes several times the code, and the sums are
    in memory.
    """
    sizes = range(size, max(size // 2, _LEAST) - 1, -1)
    return next((n for n in sizes if length % n == 0 and n % _VECTOR == 0), size)
