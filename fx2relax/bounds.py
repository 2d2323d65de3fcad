"""Bounds and indices on sizes: wrapped and clamped as eager does, short where that is provable."""

from __future__ import annotations

from typing import Any

from fx2relax.compat import const_int, tirx
from fx2relax.shapes import analyzer

_UNBOUNDED = 1 << 62  # PyTorch writes an open end as the largest int64


def bound(value: Any, size: Any, missing: Any) -> Any:
    """A slice's start or end as an index from 0 to the size: negative ones wrap, then clamped."""
    if value is None:
        return missing
    if isinstance(value, int) and isinstance(size, int):
        return min(max(value + size if value < 0 else value, 0), size)
    if isinstance(value, int) and (value == 0 or value >= _UNBOUNDED):
        return size if value else 0
    if isinstance(value, int) and value < 0:
        return simple(tirx.max(size + value, wide(0)))
    if equal(value, size):
        return size
    if not provable(wide(value) >= 0):
        value = tirx.max(tirx.Select(value < 0, value + size, value), wide(0))
    if provable(wide(value) <= wide(size)):
        return simple(value)
    return simple(tirx.min(wide(value), wide(size)))


def simple(size: Any) -> Any:
    """A size as short as TVM can make it."""
    return const_int(analyzer().simplify(wide(size)))


def provable(condition: Any) -> bool:
    """Whether a condition on sizes holds whatever the sizes are."""
    return bool(analyzer().can_prove(condition))


def equal(left: Any, right: Any) -> bool:
    """Whether two sizes are the same whatever they are."""
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    return bool(analyzer().can_prove_equal(wide(left), wide(right)))


def position(index: Any, size: Any) -> Any:
    """An index of one element, counted from the start."""
    if isinstance(index, int):
        return index if index >= 0 else size + index
    if provable(wide(index) >= 0):
        return index
    return tirx.Select(index < 0, index + size, index)


def wide(value: Any) -> Any:
    """A size or index as an int64 TIR expression."""
    if isinstance(value, int):
        return tirx.const(value, "int64")
    return value if str(value.ty.dtype) == "int64" else tirx.Cast("int64", value)
