"""Shapes and axes: the same elements in another arrangement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fx2relax.agreement import agreed
from fx2relax.bounds import equal

from .common import (
    converts,
    dtype,
    emit,
    ndim,
    normalize_axis,
    op,
    product,
    reshape,
    shape,
    shape_expr,
)
from .indices import is_one

aten = torch.ops.aten


@converts(
    aten.view.default,
    aten.view_copy.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten._reshape_copy.default,
)
def view(self: Any, size: Sequence[Any]) -> Any:
    """Another shape for the same elements; one size may be -1."""
    sizes = list(size)
    unknown = [i for i, s in enumerate(sizes) if isinstance(s, int) and s == -1]
    if unknown:
        given = sizes[: unknown[0]] + sizes[unknown[0] + 1 :]
        sizes[unknown[0]] = _left(shape(self), given)
    return reshape(self, sizes)


def _left(own: Sequence[Any], given: Sequence[Any]) -> Any:
    """The size that makes `given` as large as `own`; TVM does not cancel all common factors."""
    above, below = list(own), []
    for size in given:
        twin = next((i for i, s in enumerate(above) if equal(s, size)), None)
        if twin is None:
            below.append(size)
        else:
            del above[twin]
    numbers = [math.prod(s for s in sizes if isinstance(s, int)) for sizes in (above, below)]
    if numbers[0] == 0:
        return 0
    if all(isinstance(s, int) for s in below) and numbers[1] and numbers[0] % numbers[1] == 0:
        return product([s for s in above if not isinstance(s, int)]) * (numbers[0] // numbers[1])
    return product(above) // product(below)


@converts(aten._reshape_alias.default)
def reshape_alias(self: Any, size: Sequence[Any], stride: Sequence[Any]) -> Any:
    """A view with strides that fit its shape."""
    return reshape(self, size)


@converts(aten.permute.default, aten.permute_copy.default)
def permute(self: Any, dims: Sequence[int]) -> Any:
    """The axes in another order."""
    rank = len(dims)
    return op.permute_dims(self, [d % rank for d in dims]) if rank else self


@converts(aten.transpose.int, aten.transpose_copy.int)
def transpose(self: Any, dim0: int, dim1: int) -> Any:
    """Two axes swapped."""
    rank = ndim(self)
    axes = list(range(rank))
    if rank == 0:
        return self
    axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
    return op.permute_dims(self, axes) if axes != sorted(axes) else self


@converts(aten.t.default, aten.t_copy.default)
def t(self: Any) -> Any:
    """Transpose of a matrix; vectors and 0-d tensors stay as they are."""
    return op.permute_dims(self) if ndim(self) == 2 else self


@converts(aten.unsqueeze.default, aten.unsqueeze_copy.default)
def unsqueeze(self: Any, dim: int) -> Any:
    """A new axis of size 1."""
    return op.expand_dims(self, dim % (ndim(self) + 1))


@converts(aten.squeeze.dims, aten.squeeze_copy.dims)
def squeeze_dims(self: Any, dim: Sequence[int]) -> Any:
    """Without those of some axes that have size 1; other axes stay."""
    sizes = shape(self)
    chosen = {normalize_axis(d, len(sizes)) for d in dim}
    axes = [a for a, s in enumerate(sizes) if a in chosen and is_one(s)]
    return op.squeeze(self, axes) if axes else self


@converts(aten.squeeze.default, aten.squeeze_copy.default)
def squeeze(self: Any) -> Any:
    """Without the axes of size 1."""
    return squeeze_dims(self, range(ndim(self)))


@converts(aten.squeeze.dim, aten.squeeze_copy.dim)
def squeeze_dim(self: Any, dim: int) -> Any:
    """Without one axis, if its size is 1."""
    return squeeze_dims(self, [dim])


@converts(aten.expand.default, aten.expand_copy.default)
def expand(self: Any, size: Sequence[Any], *, implicit: bool = False) -> Any:
    """Broadcast to a shape that may have more axes in front; -1 keeps a size."""
    own = shape(self)
    new = len(size) - len(own)
    sizes = [
        own[axis - new] if isinstance(s, int) and s == -1 else s for axis, s in enumerate(size)
    ]
    return op.broadcast_to(self, shape_expr(sizes))


@converts(aten.cat.default)
def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Joined along one axis in their common dtype; an empty vector beside others is ignored."""
    common = _common_dtype(tensors)
    tensors = [x if dtype(x) == common else op.astype(x, common) for x in tensors]
    kept = [x for x in tensors if not (ndim(x) == 1 and shape(x)[0] is not None and _empty(x))]
    kept = kept or tensors[:1]
    if len(kept) == 1:
        return kept[0]
    axis = normalize_axis(dim, ndim(kept[0]))
    return op.concat(agreed(kept, apart=axis - ndim(kept[0])), axis)


def _empty(x: Any) -> bool:
    size = shape(x)[0]
    return isinstance(size, int) and size == 0


def _common_dtype(tensors: Sequence[Any]) -> str:
    from fx2relax import dtypes

    common = dtypes.to_torch(dtype(tensors[0]))
    for x in tensors[1:]:
        common = torch.promote_types(common, dtypes.to_torch(dtype(x)))
    return dtypes.to_tvm(common)


@converts(aten.stack.default)
def stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Joined along a new axis, in their common dtype."""
    axis = dim % (ndim(tensors[0]) + 1)
    return cat([op.expand_dims(x, axis) for x in tensors], axis)


@converts(aten.repeat.default)
def repeat(self: Any, repeats: Sequence[Any]) -> Any:
    """Copies along each axis; more counts than axes add axes in front."""
    own = shape(self)
    sizes = [1] * (len(repeats) - len(own)) + own
    if all(isinstance(n, int) and n > 0 for n in repeats):
        return op.tile(self, list(repeats))
    spread = [n for pair in zip(repeats, sizes, strict=True) for n in pair]
    ones = [n for size in sizes for n in (1, size)]
    copies = op.broadcast_to(emit(reshape(self, ones)), shape_expr(spread))
    return reshape(copies, [n * s for n, s in zip(repeats, sizes, strict=True)])


@converts(aten.flip.default)
def flip(self: Any, dims: Sequence[int]) -> Any:
    """The order of some axes reversed."""
    if ndim(self) == 0:
        return self
    for dim in dims:
        self = op.flip(self, normalize_axis(dim, ndim(self)))
    return self
