"""Folding a kernel's intermediate steps into their readers."""

from __future__ import annotations

from typing import Any

from .blocks import SPATIAL, Block
from .tir import TensorLoad, is_guard

# A step read at several places is copied to each: past this, copies cost more than a buffer.
_MAX_SIZE = 600
_MAX_REPEATED_COST = 8


def inline_steps(sch: Any, root: Any) -> list[Block]:
    """Inline what is cheap to compute where it is read; returns the blocks that are left."""
    pending = list(sch.get_child_blocks(root))
    kept: list[Block] = []
    blocks = [Block(sch, rv) for rv in pending]
    for n, stale in enumerate(blocks):
        # Earlier inlining has rewritten this block: look again.
        block = Block(sch, stale.rv)
        readers = [b for b in blocks[n + 1 :] if any(_reads(b, w) for w in block.writes)]
        if not readers or not _worthwhile(sch, block, readers) or not _inline(sch, block):
            kept.append(block)
    return [Block(sch, b.rv) for b in kept]


def _reads(block: Block, buffer: Any) -> bool:
    return any(r.same_as(buffer) for r in block.reads)


def _inline(sch: Any, block: Block) -> bool:
    try:
        sch.compute_inline(block.rv)
    except Exception:
        # Outputs, and steps that TVM cannot substitute, stay.
        return False
    return True


def _worthwhile(sch: Any, block: Block, readers: list[Block]) -> bool:
    if block.store is None or any(a.kind != SPATIAL for a in block.axes):
        return False
    buffer = block.store.buffer
    fresh = [Block(sch, r.rv) for r in readers]
    loads = [len(r.loads_of(buffer)) for r in fresh]
    if block.summary.size * sum(loads) > _MAX_SIZE:
        return False
    if len(fresh) > 1 and block.summary.cost > _MAX_REPEATED_COST and not _moves(block.store.value):
        return False
    return all(_fits(block, r) for r in fresh)


def _moves(value: Any) -> bool:
    """Whether a step only chooses where to read from, which costs little."""
    if is_guard(value):
        return all(_moves(branch) for branch in value.args[1:])
    return isinstance(value, TensorLoad)


def _fits(block: Block, reader: Block) -> bool:
    """Not where a reduction would compute the step again and again, or branch in its inner loop."""
    if not reader.reduces:
        return True
    if block.summary.branches:
        return False
    outer = [a.length for a in block.axes]
    inner = [a.length for a in reader.axes]
    if None in outer or None in inner:
        # With symbolic sizes, count the axes.
        again = len(inner) > len(outer)
    else:
        again = _product(inner) > _product(outer)
    return not again or block.summary.cost <= 2


def _product(values: list[int | None]) -> int:
    result = 1
    for v in values:
        result *= v or 1
    return result
