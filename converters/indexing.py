"""Reading elements at indices: `index`, `index_select`, `gather`, `take`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .common import (
    Unsupported,
    converts,
    dtype,
    ndim,
    normalize_axis,
    op,
    product,
    reshape,
    shape,
    shape_expr,
    te,
    te_call,
)
from .data_dependent import nonzero_columns
from .indices import checked, take_along

aten = torch.ops.aten

_OUT_OF_RANGE = "index out of range in self"


def split_masks(indices: Sequence[Any], count: Any = None) -> list[Any]:
    """Boolean (and uint8) masks as one integer index per dimension that they cover.

    Args:
        indices: as `aten.index` takes them.
        count: how many elements a mask chooses, if that is known.
    """
    result: list[Any] = []
    for index in indices:
        if index is None or dtype(index) not in ("bool", "uint8"):
            result.append(index)
        elif ndim(index) == 0:
            raise Unsupported("a 0-d mask")
        else:
            result.extend(nonzero_columns(index, count))
    return result


def indexed_axes(indices: Sequence[Any]) -> tuple[list[int], bool]:
    """The axes that are indexed, and whether they lie side by side."""
    axes = [i for i, index in enumerate(indices) if index is not None]
    return axes, axes == list(range(axes[0], axes[0] + len(axes))) if axes else True


def index(self: Any, indices: Sequence[Any], check: bool = True) -> Any:
    """``self[indices]``; None is a full slice."""
    indices = split_masks(indices)
    axes, adjacent = indexed_axes(indices)
    if not axes:
        return self
    if not adjacent:
        rest = [a for a in range(ndim(self)) if a not in axes]
        self = op.permute_dims(self, [*axes, *rest])
    first = axes[0] if adjacent else 0
    sizes = shape(self)
    joined = sizes[first : first + len(axes)]
    flat = checked([indices[a] for a in axes], joined, check=check)
    if len(axes) > 1:
        self = reshape(self, [*sizes[:first], product(joined), *sizes[first + len(axes) :]])
    return take_along(self, flat, first)


@converts(aten.index.Tensor)
def index_tensor(self: Any, indices: Sequence[Any]) -> Any:
    """Elements at indices: masks are as good as their nonzero positions, negative ones wrap."""
    return index(self, indices)


@converts(aten._unsafe_index.Tensor)
def unsafe_index(self: Any, indices: Sequence[Any]) -> Any:
    """`index_tensor` with indices that are known to be in range."""
    return index(self, indices, check=False)


@converts(aten.index_select.default)
def index_select(self: Any, dim: int, index: Any) -> Any:
    """Slices of one dimension; a negative index is an error."""
    if ndim(self) == 0:
        return reshape(index_select(reshape(self, [1]), 0, index), [])
    axis = normalize_axis(dim, ndim(self))
    if ndim(index) == 0:
        index = reshape(index, [1])
    kind = "IndexError" if axis == 0 else "RuntimeError"
    flat = checked([index], [shape(self)[axis]], wrap=False, message=_OUT_OF_RANGE, kind=kind)
    return take_along(self, flat, axis)


@converts(aten.take.default)
def take(self: Any, index: Any) -> Any:
    """Elements of the flattened tensor."""
    flat = reshape(self, [product(shape(self))])
    message = "out of range: tried to access an index beyond the elements of the tensor"
    return take_along(flat, checked([index], shape(flat), message=message), 0)


@converts(aten.gather.default)
def gather(self: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    """Along one dimension, the element that the index names; a negative index is an error."""
    if ndim(self) == 0:
        self = reshape(self, [1])
    rank = ndim(index)
    if rank == 0:
        return reshape(gather(self, 0, reshape(index, [1])), [])
    if any(isinstance(s, int) and s == 0 for s in shape(index)):  # of any rank
        return op.zeros(shape_expr(shape(index)), dtype(self))
    axis = normalize_axis(dim, rank)
    sizes, extents = shape(self), shape(index)
    position = checked([index], [sizes[axis]], wrap=False, kind="RuntimeError")
    same = all(
        isinstance(s, int) and isinstance(e, int) and s == e
        for a, (s, e) in enumerate(zip(sizes, extents, strict=True))
        if a != axis
    )
    if same:
        return op.gather_elements(self, position, axis)

    def pick(x: Any, at: Any) -> Any:
        def element(*i: Any) -> Any:
            return x(*[at(*i) if a == axis else v for a, v in enumerate(i)])

        return te.compute(at.shape, element, name="gather")

    return te_call(pick, self, position)
