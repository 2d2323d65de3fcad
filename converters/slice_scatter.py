"""Writing a part of a tensor, and the gradients of reading one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fx2relax.bounds import equal, position

from .common import (
    cast,
    compute_dtype,
    converts,
    dtype,
    emit,
    ndim,
    normalize_axis,
    op,
    reshape,
    shape_expr,
    te,
    te_call,
    tirx,
)
from .common import shape as shape_of
from .opaque import wide
from .slices import span

aten = torch.ops.aten

# From the coordinates of an element and the sizes to: whether it is in the part, and where.
Part = Callable[[Sequence[Any], Sequence[Any]], tuple[Any, Sequence[Any]]]


def replaced(
    part: Any, into: Any, sizes: Sequence[Any], numbers: Sequence[Any], where: Part
) -> Any:
    """A tensor in which a part is replaced.

    Args:
        part: the part's new elements; of the tensor's dtype, once they are written.
        into: the tensor, or None for zeros.
        sizes: the tensor's shape.
        numbers: sizes that `where` uses.
        where: see `Part`.
    """
    kind = dtype(part if into is None else into)
    part = cast(part, kind)

    def kernel(new: Any, old: Any, full: Any, extra: Any) -> Any:
        def element(*i: Any) -> Any:
            inside, at = where(i, extra)
            rest = old[0](*i) if old else tirx.const(0, kind)
            return tirx.if_then_else(inside, new(*at), rest)

        return te.compute(list(full), element, name="replace_part")

    olds = [] if into is None else [into]
    return te_call(kernel, emit(part), olds, [wide(s) for s in sizes], [wide(n) for n in numbers])


def _slice(part: Any, into: Any, sizes: Any, dim: int, start: Any, end: Any, step: Any) -> Any:
    axis = normalize_axis(dim, len(sizes))
    first, last, _ = span(sizes[axis], start, end, step)

    def where(i: Sequence[Any], numbers: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        low, high, stride = numbers
        inside = tirx.And(i[axis] >= low, i[axis] < high)
        at = list(i)
        at[axis] = i[axis] - low
        if not (isinstance(stride, tirx.IntImm) and int(stride.value) == 1):
            inside = tirx.And(inside, tirx.floormod(i[axis] - low, stride).equal(wide(0)))
            at[axis] = tirx.floordiv(i[axis] - low, stride)
        return inside, at

    return replaced(part, into, sizes, [first, last, step], where)


@converts(aten.slice_scatter.default)
def slice_scatter(
    self: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Any:
    """`self` with a slice replaced."""
    return _slice(src, self, shape_of(self), dim, start, end, step)


@converts(aten.slice_backward.default)
def slice_backward(
    grad_output: Any, input_sizes: Sequence[Any], dim: int, start: Any, end: Any, step: Any
) -> Any:
    """Zeros with a slice replaced."""
    return _slice(grad_output, None, list(input_sizes), dim, start, end, step)


def _select(part: Any, into: Any, sizes: Any, dim: int, index: Any) -> Any:
    axis = normalize_axis(dim, len(sizes))

    def where(i: Sequence[Any], numbers: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        return i[axis].equal(numbers[0]), [v for a, v in enumerate(i) if a != axis]

    return replaced(part, into, sizes, [position(index, sizes[axis])], where)


@converts(aten.select_scatter.default)
def select_scatter(self: Any, src: Any, dim: int, index: Any) -> Any:
    """`self` with one element of an axis replaced."""
    return _select(src, self, shape_of(self), dim, index)


@converts(aten.select_backward.default)
def select_backward(grad_output: Any, input_sizes: Sequence[Any], dim: int, index: Any) -> Any:
    """Zeros with one element of an axis replaced."""
    return _select(grad_output, None, list(input_sizes), dim, index)


def _diagonal(part: Any, into: Any, sizes: Any, shift: int, dim1: int, dim2: int) -> Any:
    rank = len(sizes)
    row, column = normalize_axis(dim1, rank), normalize_axis(dim2, rank)

    def where(i: Sequence[Any], numbers: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        along = i[row] if shift >= 0 else i[column]
        rest = [v for a, v in enumerate(i) if a not in (row, column)]
        return (i[column] - i[row]).equal(wide(shift)), [*rest, along]

    return replaced(part, into, sizes, [], where)


@converts(aten.diagonal_scatter.default)
def diagonal_scatter(self: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """`self` with a diagonal replaced."""
    return _diagonal(src, self, shape_of(self), offset, dim1, dim2)


@converts(aten.diagonal_backward.default)
def diagonal_backward(
    grad_output: Any, input_sizes: Sequence[Any], offset: int, dim1: int, dim2: int
) -> Any:
    """Zeros with a diagonal replaced."""
    return _diagonal(grad_output, None, list(input_sizes), offset, dim1, dim2)


@converts(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(self: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """The elements whose coordinates on two axes differ by `offset`, as a last axis."""
    sizes = shape_of(self)
    rank = len(sizes)
    row, column = normalize_axis(dim1, rank), normalize_axis(dim2, rank)
    down, right = max(-offset, 0), max(offset, 0)
    height, width = sizes[row] - down, sizes[column] - right
    if isinstance(height, int) and isinstance(width, int):
        length: Any = max(min(height, width), 0)
    else:
        length = height if equal(height, width) else tirx.min(wide(height), wide(width))
        length = tirx.max(length, wide(0)) if offset else length
    rest = [s for a, s in enumerate(sizes) if a not in (row, column)]

    def kernel(x: Any, full: Any) -> Any:
        def element(*i: Any) -> Any:
            outer = iter(i[:-1])
            at = {row: i[-1] + down, column: i[-1] + right}
            return x(*[at[a] if a in at else next(outer) for a in range(rank)])

        return te.compute(list(full), element, name="diagonal")

    return te_call(kernel, self, [wide(s) for s in [*rest, length]])


@converts(aten.unfold.default, aten.unfold_copy.default)
def unfold(self: Any, dimension: int, size: int, step: int) -> Any:
    """Windows of one axis, `step` apart, as a last axis."""
    if ndim(self) == 0:
        return reshape(self, [1]) if size else _empty(self)
    axis = normalize_axis(dimension, ndim(self))
    sizes = shape_of(self)
    whole = sizes[axis] - size
    static = isinstance(whole, int)
    sizes[axis] = whole // step + 1 if static else tirx.floordiv(whole, wide(step)) + 1

    def kernel(x: Any, full: Any) -> Any:
        def element(*i: Any) -> Any:
            at = list(i[:-1])
            at[axis] = i[axis] * step + i[-1]
            return x(*at)

        return te.compute(list(full), element, name="unfold")

    return te_call(kernel, self, [wide(s) for s in [*sizes, size]])


def _empty(x: Any) -> Any:
    return op.zeros(shape_expr([0]), dtype(x))


@converts(aten.unfold_backward.default)
def unfold_backward(
    grad_in: Any, input_sizes: Sequence[Any], dim: int, size: int, step: int
) -> Any:
    """For each element the sum of the gradients of its places in the windows.

    `istft` hands it a gradient that has 1 where the input has its batch.
    """
    rank = len(input_sizes)
    if rank == 0:
        return reshape(grad_in, [])
    axis = normalize_axis(dim, rank)
    sizes = [*input_sizes, size]
    sizes[axis] = shape_of(grad_in)[axis]
    grad_in = op.broadcast_to(grad_in, shape_expr(sizes))
    kind = dtype(grad_in)
    wider = compute_dtype(kind)

    def kernel(grad: Any, full: Any) -> Any:
        windows = grad.shape[axis]
        k = te.reduce_axis((0, size), name="k")

        def element(*i: Any) -> Any:
            start = i[axis] - k
            window = tirx.floordiv(start, wide(step))
            held = tirx.And(start >= 0, window < windows)
            if step != 1:
                held = tirx.And(held, tirx.floormod(start, wide(step)).equal(wide(0)))
            at = [window if a == axis else v for a, v in enumerate(i)]
            value = tirx.if_then_else(held, grad(*at, k), tirx.const(0, kind))
            return te.sum(tirx.Cast(wider, value) if wider != kind else value, axis=[k])

        total = te.compute(list(full), element, name="unfold_backward")
        if wider == kind:
            return total
        return te.compute(list(full), lambda *i: tirx.Cast(kind, total(*i)), name="narrow")

    return te_call(kernel, grad_in, [wide(s) for s in input_sizes])
