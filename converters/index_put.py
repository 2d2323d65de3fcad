"""Writing slices at indices: `index_put`, `index_add`, `index_copy`, `index_fill`, `put`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fx2relax.bounds import provable

from .common import (
    Unsupported,
    cast,
    const,
    converts,
    dtype,
    emit,
    ndim,
    normalize_axis,
    op,
    product,
    reshape,
    shape,
)
from .data_dependent import truth_of
from .indexing import indexed_axes, masks_of, split_masks
from .indices import checked, is_one, offset, spread
from .opaque import is_large, loops, wide
from .scatter import Action, written

aten = torch.ops.aten

# Eager's words, less the shapes: a kernel's messages are fixed.
_DO_NOT_FIT = "shape mismatch: value tensor cannot be broadcast to indexing result"


def rows(
    x: Any,
    axis: int,
    index: Any,
    values: Any,
    how: str | None = None,
    include_self: bool = True,
    joined: int = 1,
) -> Any:
    """Write slices along `axis` (`joined` axes taken as one) at a flat index that was checked.

    `values` has the index's axes in place of the joined ones, or is one element for all.
    """
    sizes = shape(x)
    before, after = product(sizes[:axis]), product(sizes[axis + joined :])
    middle, count = product(sizes[axis : axis + joined]), product(shape(index))
    single = all(is_one(s) for s in shape(values)) and not (
        is_one(before) and is_one(after) and is_one(count)
    )
    wide_enough = isinstance(after, int) and after % 64 == 0 and is_large(after * count)
    shares = 4 if wide_enough else 1  # slices of the inner axes, so that no two threads meet

    def visit(ins: Any, numbers: Sequence[Any], action: Action) -> None:
        outer, full, inner, many = numbers
        part = inner // shares if shares > 1 else inner
        sizes = [shares, outer, many, part]
        with loops(sizes, parallel=0 if shares > 1 else None) as (share, p, m, s):
            at = share * part + s
            target = offset([p, ins[0][m], at], [full * inner, inner, 1])
            source = wide(0) if single else offset([p, m, at], [many * inner, inner, 1])
            action(target, ins[1][source])

    numbers = [before, middle, after, count]
    return written("index_put", x, [index, values], numbers, visit, how, include_self)


@converts(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(self: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """``self[indices] = values``, or added to it; several values for one place add up."""
    _refuse_indices(self, indices)
    count = _mask_count(self, indices, values)
    masked = _masked(self, indices, values, accumulate) if is_one(count) else None
    if masked is not None:
        return masked
    if dtype(values) != dtype(self):
        raise Unsupported("values of another dtype, which PyTorch refuses")
    # A size that only the data tells may be 1, and is then broadcast.
    certain = count is not None and provable(wide(count) > 1)
    indices = split_masks(indices, count if certain else None)
    axes, adjacent = indexed_axes(indices)
    rank = ndim(self)
    order = list(range(rank))
    first, rest = axes[0], shape(self)[axes[0] + len(axes) :]
    if not adjacent:
        order = [*axes, *[a for a in range(rank) if a not in axes]]
        first, rest = 0, [shape(self)[a] for a in order[len(axes) :]]
        self = emit(op.permute_dims(self, order))
    sizes = shape(self)
    joined = sizes[first : first + len(axes)]
    flat = checked([indices[a] for a in axes], joined)
    if not all(is_one(s) for s in shape(values)):
        full = [*sizes[:first], *shape(flat), *rest]
        values = spread(values, full, _DO_NOT_FIT, "RuntimeError")
    result = rows(self, first, flat, values, "sum" if accumulate else None, joined=len(axes))
    if adjacent:
        return result
    return op.permute_dims(result, [order.index(a) for a in range(rank)])


def _refuse_indices(self: Any, indices: Sequence[Any]) -> None:
    """Raise for what eager refuses by the shapes alone; PyTorch's trace lets it through."""
    if all(index is None for index in indices):
        raise IndexError("no index")
    sizes, masks, axis = shape(self), masks_of(indices), 0
    for place, index in enumerate(indices):
        own = shape(index) if index is not None else []
        if place in masks:
            for mine, given in zip(sizes[axis:], own, strict=False):
                if isinstance(mine, int) and isinstance(given, int) and mine != given:
                    raise IndexError("the mask's shape does not match that of the tensor")
            axis += len(own)
            continue
        count = product(own) if index is not None else 0
        if isinstance(count, int) and count and isinstance(sizes[axis], int) and not sizes[axis]:
            raise IndexError("index is out of bounds for a dimension of size 0")
        axis += 1


def _mask_count(self: Any, indices: Sequence[Any], values: Any) -> Any:
    """How many elements a lone mask must choose, or 1 for any number; None where none is alone."""
    masks = masks_of(indices)
    if len(masks) != 1 or any(x is not None for i, x in enumerate(indices) if i != masks[0]):
        return None
    covered = ndim(indices[masks[0]])
    behind = ndim(self) - masks[0] - covered
    sizes = shape(values)
    return sizes[len(sizes) - 1 - behind] if len(sizes) > behind else 1


def _masked(self: Any, indices: Sequence[Any], values: Any, accumulate: bool) -> Any:
    """A lone mask with the same values for every element that it chooses: a `where`."""
    (first,) = masks_of(indices)
    mask = indices[first]
    covered = ndim(mask)
    behind = ndim(self) - first - covered
    if covered == 0:
        return None
    sizes = shape(values)
    if all(is_one(s) for s in sizes) and not accumulate:
        # One number, of any dtype, as eager fills it in.
        values, sizes = emit(cast(reshape(values, []), dtype(self))), []
    if dtype(values) != dtype(self):
        return None
    if len(sizes) > behind:  # the axis of the chosen elements, of size 1
        cut = len(sizes) - 1 - behind
        sizes = [*sizes[:cut], *[1] * covered, *sizes[cut + 1 :]]
        values = reshape(values, sizes)
    own = shape(self)[ndim(self) - len(sizes) :]
    full = [1 if is_one(s) else f for s, f in zip(sizes, own, strict=True)]
    values = spread(values, full, _DO_NOT_FIT, "RuntimeError")
    chosen = reshape(truth_of(mask), [*shape(mask), *[1] * behind])
    new = emit(op.add(self, values)) if accumulate and dtype(self) != "bool" else values
    if accumulate and dtype(self) == "bool":
        new = emit(op.logical_or(self, values))
    return op.where(chosen, new, self)


def _refuse_other(self: Any, source: Any) -> None:
    # Not `Unsupported`: PyTorch's decompositions convert, where the operators themselves refuse.
    if dtype(source) != dtype(self):
        raise TypeError(f"a source of {dtype(source)}, which PyTorch refuses")


@converts(aten.index_add.default)
def index_add(self: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Any:
    """Slices added to; a negative index is an error."""
    _refuse_other(self, source)
    if alpha != 1:
        source = emit(op.multiply(source, const(alpha, source)))
    kind = "RuntimeError" if ndim(self) > 1 else "IndexError"
    return _along(self, dim, index, source, "sum", kind=kind)


@converts(aten.index_copy.default)
def index_copy(self: Any, dim: int, index: Any, source: Any) -> Any:
    """Slices replaced; a negative index is an error."""
    _refuse_other(self, source)
    return _along(self, dim, index, source)


@converts(aten.index_fill.int_Scalar)
def index_fill(self: Any, dim: int, index: Any, value: Any) -> Any:
    """Slices filled with a number; negative indices wrap."""
    return _along(self, dim, index, cast(value, dtype(self)), wrap=True)


@converts(aten.index_fill.int_Tensor)
def index_fill_tensor(self: Any, dim: int, index: Any, value: Any) -> Any:
    """`index_fill` with a 0-d tensor."""
    return _along(self, dim, index, cast(value, dtype(self)), wrap=True)


@converts(aten.index_reduce.default)
def index_reduce(
    self: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:
    """Slices combined; a negative index is an error."""
    if reduce not in ("prod", "mean", "amax", "amin"):
        raise Unsupported(f"reduce={reduce!r}")
    _refuse_other(self, source)
    return _along(self, dim, index, source, reduce, include_self)


def _along(
    self: Any,
    dim: int,
    index: Any,
    values: Any,
    how: str | None = None,
    include_self: bool = True,
    wrap: bool = False,
    kind: str = "IndexError",
) -> Any:
    sizes = shape(self)
    axis = normalize_axis(dim, len(sizes))
    if not sizes:
        self = reshape(self, [1])
    if ndim(index) == 0:
        index = reshape(index, [1])
    flat = checked([index], [shape(self)[axis]], wrap=wrap, kind=kind)
    return reshape(rows(self, axis, flat, values, how, include_self), sizes)


@converts(aten.put.default)
def put(self: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    """Elements of the flattened tensor replaced or added to."""
    _refuse_other(self, source)
    count = product(shape(self))
    flat = checked([reshape(index, [product(shape(index))])], [count])
    how = "sum" if accumulate else None
    return reshape(rows(reshape(self, [count]), 0, flat, source, how), shape(self))
