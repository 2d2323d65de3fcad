"""Sums, products and extremes that the threads share: each joins parts of the terms.

How many parts there are depends on neither the machine nor its threads, and so the result does not.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from .cascade import Leaf, Row, Running, sum_of
from .tir import Substitute, counted, rebuild_for

SHARE = "fx2relax.share"
_PARTS = 32
_LINE = 16  # elements at least between what two threads write to
_WHOLE = 64  # terms of which a part has a multiple: whole vectors


def shared(loop: Any, running: Running, along: str) -> Any:
    """A loop over terms, parts of it side by side; without its mark alone where `sum_of` has none.

    Args:
        loop: the outermost of a nest, or the only one.
        running: see `Running`.
        along: the mark of a loop along a vector.
    """
    marks = {k: v for k, v in loop.annotations.items() if k != SHARE}
    found = sum_of(loop, running, along)
    if found is None:
        return _again(loop, loop.loop_var, loop.extent, loop.body, marks)
    loops, leaf = found
    var = loop.loop_var
    dtype = var.ty.dtype
    length = int(leaf.loop.extent) if leaf.vector else 1
    apart = tirx.const(-(-length // _LINE) * _LINE, dtype)
    whole = 1 if leaf.vector else _WHOLE
    several = tirx.const(_PARTS * whole, dtype)
    size = tirx.floordiv(loop.extent + (several - 1), several) * whole
    parts = tirx.decl_buffer((_PARTS * int(apart),), str(leaf.store.buffer.dtype), "parts")

    def part(p: Any) -> Any:
        row, first = Row(parts, p * apart), p * size
        count = tirx.max(tirx.min(size, loop.extent - first), tirx.const(0, dtype))
        own = tirx.Var(var.name, dtype)
        body = Substitute({var: first + own}).stmt(_inside(loops[1:], leaf, row))
        return tirx.SeqStmt([leaf.clear(row), _again(loop, own, count, body, marks)])

    return tirx.SeqStmt(
        [
            tirx.AllocBuffer(parts),
            counted("part", dtype, _PARTS, part, tirx.ForKind.PARALLEL),
            counted("part", dtype, _PARTS, lambda p: leaf.flush(Row(parts, p * apart), None)),
        ]
    )


def _inside(loops: list[Any], leaf: Leaf, row: Row) -> Any:
    body = leaf.adding(row)
    for each in reversed(loops):
        body = rebuild_for(each, each.extent, body)
    return body


def _again(loop: Any, var: Any, extent: Any, body: Any, marks: dict[str, Any]) -> Any:
    return tirx.For(var, loop.min, extent, loop.kind, body, None, marks)
