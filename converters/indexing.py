"""Reading elements at indices: `index`, `index_select`, `gather`, `take`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fx2relax.bounds import equal

from .common import (
    Refused,
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
    tirx,
)
from .data_dependent import as_size, nonzero_columns
from .indices import INJECTIVE, broadcast_sizes, checked, in_range, is_one, spread, take_along
from .opaque import opaque, wide

aten = torch.ops.aten

_OUT_OF_RANGE = "index out of range in self"


def split_masks(indices: Sequence[Any], count: Any = None) -> list[Any]:
    """Boolean (and uint8) masks as one integer index per dimension that they cover.

    Args:
        indices: as `aten.index` takes them.
        count: how many elements a mask chooses, if that is known.
    """
    result: list[Any] = []
    masked: list[int] = []
    for index in indices:
        if index is None or dtype(index) not in ("bool", "uint8"):
            result.append(index)
        elif ndim(index) == 0:
            raise Unsupported("a 0-d mask")
        else:
            columns = nonzero_columns(index, count)
            masked.extend(range(len(result), len(result) + len(columns)))
            result.extend(columns)
    given = [i for i, index in enumerate(result) if index is not None]
    alone = len(masks_of(indices)) == 1 and given == masked
    return result if alone or not masked else _together(result, given, masked)


def masks_of(indices: Sequence[Any]) -> list[int]:
    """Which of the indices are masks."""
    return [i for i, x in enumerate(indices) if x is not None and dtype(x) in ("bool", "uint8")]


def _together(indices: Sequence[Any], given: Sequence[int], masked: Sequence[int]) -> list[Any]:
    """Indices that masks chose broadcast with the others: how many they are, only the data tells.

    A mask that chooses one element stands for as many as the other indices have.
    """
    sizes = broadcast_sizes([shape(indices[i]) for i in given])
    counts: list[Any] = []
    for i in given:
        size = shape(indices[i])[-1] if ndim(indices[i]) else 1
        if not is_one(size) and not any(equal(size, c) for c in counts):
            counts.append(size)
    if len(counts) > 1:
        known = [c for c in counts if isinstance(c, int)]
        sizes[-1] = known[0] if known else _joined(counts)
    message = "shape mismatch: indexing tensors could not be broadcast together"
    whole = given if len(counts) > 1 else masked
    return [
        spread(x, sizes, message, "IndexError") if i in whole else x for i, x in enumerate(indices)
    ]


def _joined(sizes: Sequence[Any]) -> Any:
    """The size that others broadcast to, when only the data tells which of them are 1."""

    def body(_: Any, outs: Any, numbers: list[Any]) -> None:
        joined: Any = wide(1)
        for number in numbers:
            joined = tirx.Select(joined.equal(wide(1)), number, joined)
        outs[0][0] = joined

    return as_size(opaque("joined_size", body, [], lambda _: [(1, "int64")], sizes))


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
    # Where nothing is read, eager looks at no index.
    others = [*sizes[:first], *sizes[first + len(axes) :]]
    check = check and not any(equal(size, 0) for size in others)
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
    if equal(shape(self)[axis], 0) and not equal(shape(index)[0], 0):
        raise Refused("elements of an axis that has none")
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
    return along(self, axis, index, in_range(index, shape(self)[axis], kind="RuntimeError"))


def along(self: Any, axis: int, position: Any, zero: Any = None) -> Any:
    """`gather` at positions that have been checked, or are once there is a `zero` (`in_range`)."""

    def pick(x: Any, at: Any, zero: Any) -> Any:
        def element(*i: Any) -> Any:
            place = at(*i).astype("int64")
            place = place if zero is None else place + zero(0)
            return x(*[place if a == axis else v for a, v in enumerate(i)])

        return te.compute(at.shape, element, name="gather")

    return te_call(pick, self, position, zero, primfunc_attrs=INJECTIVE)
