"""Parts of a tensor along its axes, and writing them back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fx2relax.bounds import bound, equal, position, provable, simple

from .common import (
    Unsupported,
    converts,
    ndim,
    normalize_axis,
    op,
    shape,
    tirx,
)
from .indices import is_one
from .opaque import wide

aten = torch.ops.aten


def span(size: Any, start: Any, end: Any, step: Any) -> tuple[Any, Any, Any]:
    """The first index of a slice, the index after its last, and its length."""
    first, last = bound(start, size, 0), bound(end, size, size)
    if isinstance(first, int) and isinstance(last, int):
        last = max(first, last)
    elif not (isinstance(first, int) and first == 0) and not provable(wide(first) <= wide(last)):
        last = simple(tirx.max(wide(first), wide(last)))
    if is_one(step):
        return first, last, last - first
    if all(isinstance(n, int) for n in (first, last, step)):
        return first, last, (last - first + step - 1) // step
    return first, last, tirx.floordiv(last - first + step - 1, wide(step))


def cut(x: Any, axis: int, first: Any, last: Any, step: Any = 1) -> Any:
    """``x[..., first:last:step, ...]`` with bounds that are in range."""
    size = shape(x)[axis]
    whole = isinstance(first, int) and first == 0 and is_one(step)
    if whole and equal(last, size):
        return x
    return op.strided_slice(
        x, [axis], [wide(first)], [wide(last)], [wide(step)], assume_inbound=True
    )


@converts(aten.slice.Tensor, aten.slice_copy.Tensor)
def slice_(self: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    """Every `step`-th element from `start` to `end`; bounds wrap once and are clamped."""
    axis = normalize_axis(dim, ndim(self))
    first, last, _ = span(shape(self)[axis], start, end, step)
    return cut(self, axis, first, last, step)


@converts(aten.select.int, aten.select_copy.int)
def select(self: Any, dim: int, index: Any) -> Any:
    """One element of an axis, without that axis."""
    axis = normalize_axis(dim, ndim(self))
    at = position(index, shape(self)[axis])
    return op.squeeze(cut(self, axis, at, at + 1), [axis])


@converts(
    aten.split_with_sizes.default,
    aten.unsafe_split_with_sizes.default,
    aten.split_with_sizes_copy.default,
)
def split_with_sizes(self: Any, split_sizes: Sequence[Any], dim: int = 0) -> Any:
    """Parts of given sizes along one axis."""
    axis = normalize_axis(dim, ndim(self))
    parts, start = [], 0
    for size in split_sizes:
        parts.append(cut(self, axis, start, start + size))
        start = start + size
    return tuple(parts)


@converts(aten.split.Tensor, aten.unsafe_split.Tensor, aten.split_copy.Tensor)
def split(self: Any, split_size: Any, dim: int = 0) -> Any:
    """Parts of one size along an axis; the last may be smaller."""
    axis = normalize_axis(dim, ndim(self))
    size = shape(self)[axis]
    if not (isinstance(size, int) and isinstance(split_size, int)):
        raise Unsupported("a symbolic size")
    if size == 0:
        return (self,)
    starts = range(0, size, split_size)
    return tuple(cut(self, axis, s, min(s + split_size, size)) for s in starts)


@converts(aten.unbind.int, aten.unbind_copy.int)
def unbind(self: Any, dim: int = 0) -> Any:
    """Every element of one axis."""
    axis = normalize_axis(dim, ndim(self))
    count = shape(self)[axis]
    if not isinstance(count, int):
        raise Unsupported("a symbolic number of results")
    return tuple(select(self, axis, i) for i in range(count))
