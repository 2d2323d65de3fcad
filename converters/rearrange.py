"""Elements moved within a tensor, or seen through strides of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .common import (
    cast,
    converts,
    dtype,
    ndim,
    normalize_axis,
    op,
    product,
    reshape,
    shape,
    te,
    te_call,
    tirx,
)
from .indices import offset
from .opaque import fill, loops, opaque, wide
from .slices import cut

aten = torch.ops.aten


@converts(aten.roll.default)
def roll(self: Any, shifts: Sequence[Any], dims: Sequence[int] = ()) -> Any:
    """Elements moved along some axes (the flattened tensor's, for none), round the end."""
    shifts = list(shifts) if isinstance(shifts, (list, tuple)) else [shifts]
    if not dims:
        flat = reshape(self, [product(shape(self))])
        return reshape(roll(flat, shifts, [0]), shape(self)) if ndim(self) else self
    for dim, shift in zip(dims, shifts, strict=True):
        self = _roll(self, normalize_axis(dim, ndim(self)), shift)
    return self


def _roll(x: Any, axis: int, shift: Any) -> Any:
    size = shape(x)[axis]
    if isinstance(size, int) and isinstance(shift, int):
        at = (size - shift) % size if size else 0
        return op.concat([cut(x, axis, at, size), cut(x, axis, 0, at)], axis) if at else x

    def kernel(t: Any, by: Any) -> Any:
        def element(*i: Any) -> Any:
            moved = tirx.floormod(i[axis] - by, t.shape[axis])
            return t(*[moved if a == axis else v for a, v in enumerate(i)])

        return te.compute(t.shape, element, name="roll")

    return te_call(kernel, x, wide(shift))


@converts(aten.as_strided.default, aten.as_strided_copy.default)
def as_strided(
    self: Any, size: Sequence[Any], stride: Sequence[Any], storage_offset: Any = None
) -> Any:
    """Elements at strides of the tensor's own memory, which is compact."""
    flat = reshape(self, [product(shape(self))])
    rank = len(size)

    def kernel(x: Any, numbers: Any) -> Any:
        extents, steps, start = numbers[:rank], numbers[rank:-1], numbers[-1]
        return te.compute(
            list(extents), lambda *i: x(start + offset(i, list(steps))), name="as_strided"
        )

    return te_call(kernel, flat, [wide(n) for n in [*size, *stride, storage_offset or 0]])


@converts(aten.as_strided_scatter.default)
def as_strided_scatter(
    self: Any,
    src: Any,
    size: Sequence[Any],
    stride: Sequence[Any],
    storage_offset: Any = None,
) -> Any:
    """The tensor with the elements at some strides of its memory replaced, in order."""
    rank = len(size)
    count = product(shape(self))

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        extents, steps, start = numbers[1 : 1 + rank], numbers[1 + rank : -1], numbers[-1]
        fill(outs[0], numbers[0], lambda i: ins[0][i])
        compact = [product(extents[a + 1 :]) for a in range(rank)]
        with loops(extents) as at:
            outs[0][wide(start) + offset(at, steps)] = ins[1][offset(at, compact)]

    kind = dtype(self)
    src = cast(src, kind)
    numbers = [count, *size, *stride, storage_offset or 0]
    flat = opaque("as_strided_scatter", body, [self, src], lambda n: [(n[0], kind)], numbers)
    return reshape(flat, shape(self))
