"""Results whose size depends on the data: counted first, then filled."""

from __future__ import annotations

from typing import Any

import torch

from fx2relax.compat import BlockBuilder, ShapeType

from .common import (
    converts,
    dtype,
    emit,
    ndim,
    op,
    product,
    relax,
    reshape,
    scalar,
    shape,
    shape_expr,
    tirx,
)
from .elementwise import negated
from .indices import broadcast_sizes
from .opaque import T, fill, local, loops, opaque, require, wide

aten = torch.ops.aten


def as_size(count: Any) -> Any:
    """A 1-element int64 tensor as a size."""
    size = tirx.Var("n", "int64")
    sizes = emit(op.tensor_to_shape(emit(count)))
    BlockBuilder.current().match_cast(sizes, ShapeType([size]))
    return size


def truth(x: Any) -> Any:
    """A scalar TIR expression as a condition; NaN is true."""
    return x if str(x.ty.dtype) == "bool" else negated(tirx.EQ(x, tirx.const(0, x.ty.dtype)))


def count_nonzero(x: Any) -> Any:
    """How many elements are not zero, as a size."""

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        outs[0][0] = wide(0)
        with loops(numbers) as (i,):
            outs[0][0] += tirx.Cast("int64", truth(ins[0][i]))

    return as_size(
        opaque("count_nonzero", body, [x], lambda _: [(1, "int64")], [product(shape(x))])
    )


def nonzero_columns(x: Any, count: Any = None) -> list[Any]:
    """The positions of nonzero elements, in order, one int64 vector per dimension.

    Raises, when run, RuntimeError if `count` is given and another number is found.
    """
    sizes = shape(x)
    rank = len(sizes)
    known = count is not None
    count = count if known else count_nonzero(x)

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        expected, extents = wide(numbers[0]), numbers[1:]
        found = local("int64")
        found[0] = wide(0)
        flat = local("int64")
        flat[0] = wide(0)
        with loops(extents) as at:
            with T.If(truth(ins[0][flat[0]])), T.Then():
                with T.If(found[0] < expected), T.Then():
                    for column, coordinate in zip(outs, at, strict=True):
                        column[found[0]] = coordinate
                found[0] += wide(1)
            flat[0] += wide(1)
        if known:
            message = "shape mismatch: value tensor cannot be broadcast to indexing result"
            require(found[0].equal(expected), message)

    columns = opaque("nonzero", body, [x], lambda n: [(n[0], "int64")] * rank, [count, *sizes])
    if rank == 1:
        return [columns]
    return [emit(relax.TupleGetItem(columns, k)) for k in range(rank)]


def truth_of(x: Any) -> Any:
    """A tensor as booleans; NaN is true."""
    return x if dtype(x) == "bool" else op.not_equal(x, scalar(0, dtype(x)))


@converts(aten.nonzero.default)
def nonzero(self: Any) -> Any:
    """The positions of nonzero elements, one row each; NaN is nonzero."""
    if ndim(self) == 0:
        count = count_nonzero(self)
        return op.zeros(relax.ShapeExpr([count, wide(0)]), "int64")
    return op.stack(nonzero_columns(self), axis=1)


@converts(aten.nonzero_static.default)
def nonzero_static(self: Any, *, size: Any, fill_value: int = -1) -> Any:
    """The first `size` positions of nonzero elements; rows that are left get the fill value."""
    sizes = shape(self)
    rank = len(sizes)

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        rows, extents = wide(numbers[0]), numbers[1:]
        fill(outs[0], numbers[0] * rank, lambda _: wide(fill_value))
        found, flat = counter(), counter()
        with loops(extents) as at:
            with T.If(tirx.And(truth(ins[0][flat[0]]), found[0] < rows)), T.Then():
                for column, coordinate in enumerate(at):
                    outs[0][found[0] * rank + column] = coordinate
                found[0] += wide(1)
            flat[0] += wide(1)

    if rank == 0:
        return op.zeros(shape_expr([size, 0]), "int64")
    flat = opaque("nonzero", body, [self], lambda n: [(n[0] * rank, "int64")], [size, *sizes])
    return reshape(flat, [size, rank])


def counter() -> Any:
    """A variable of a kernel, an int64 that starts at 0 and is read as ``[0]``."""
    variable = local("int64")
    variable[0] = wide(0)
    return variable


@converts(aten.masked_select.default)
def masked_select(self: Any, mask: Any) -> Any:
    """The elements where the mask is true, in order."""
    sizes = shape_expr(broadcast_sizes([shape(self), shape(mask)]))
    self, mask = op.broadcast_to(self, sizes), op.broadcast_to(mask, sizes)
    return chosen(self, mask, count_nonzero(mask))


def chosen(x: Any, mask: Any, size: Any) -> Any:
    """A vector that starts with the elements where the mask is true; the rest is 0."""
    kind = dtype(x)

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        room, total = numbers
        fill(outs[0], room, lambda _: tirx.const(0, kind))
        found = counter()
        with (
            loops([total]) as (i,),
            T.If(tirx.And(truth(ins[1][i]), found[0] < wide(room))),
            T.Then(),
        ):
            outs[0][found[0]] = ins[0][i]
            found[0] += wide(1)

    numbers = [size, product(shape(x))]
    return opaque("masked_select", body, [x, mask], lambda n: [(n[0], kind)], numbers)


@converts(aten.masked_scatter.default)
def masked_scatter(self: Any, mask: Any, source: Any) -> Any:
    """Where the mask is true the source's elements, in order; too few of them are an error."""
    sizes = broadcast_sizes([shape(self), shape(mask)])
    self = op.broadcast_to(self, shape_expr(sizes))
    mask = op.broadcast_to(mask, shape_expr(sizes))
    kind = dtype(self)

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        total, given = numbers
        found = counter()
        with loops([total]) as (i,):
            outs[0][i] = ins[0][i]
            with T.If(truth(ins[1][i])), T.Then():
                with T.If(found[0] < wide(given)), T.Then():
                    outs[0][i] = ins[2][found[0]]
                found[0] += wide(1)
        message = "Number of elements of source < number of ones in mask"
        require(found[0] <= wide(given), message)

    numbers = [product(sizes), product(shape(source))]
    flat = opaque("masked_scatter", body, [self, mask, source], lambda n: [(n[0], kind)], numbers)
    return reshape(flat, sizes)


@converts(aten.masked_scatter_backward.default)
def masked_scatter_backward(grad_output: Any, mask: Any, sizes: Any) -> Any:
    """The gradients of the source's elements; 0 for those that were not used."""
    full = shape_expr(broadcast_sizes([shape(grad_output), shape(mask)]))
    grad, mask = op.broadcast_to(grad_output, full), op.broadcast_to(mask, full)
    return reshape(chosen(grad, mask, product(sizes)), sizes)


@converts(aten.repeat_interleave.Tensor)
def repeat_interleave(repeats: Any, *, output_size: Any = None) -> Any:
    """Each position as many times as its count says; a wrong `output_size` is an error."""
    kind, count = dtype(repeats), shape(repeats)[0]
    size = output_size

    def measure(ins: Any, outs: Any, numbers: list[Any]) -> None:
        outs[0][0] = wide(0)
        least = counter()
        with loops(numbers) as (i,):
            outs[0][0] += wide(ins[0][i])
            least[0] = tirx.min(least[0], wide(ins[0][i]))
        require(least[0] >= wide(0), "repeats can not be negative")

    total = opaque("sum_repeats", measure, [repeats], lambda _: [(1, "int64")], [count])
    if size is None:
        size = as_size(total)

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        many, room = numbers
        message = "allocated size does not match required size"
        require(ins[1][0].equal(wide(room)), message)
        found = counter()
        with loops([many]) as (i,), loops([ins[0][i]]):
            outs[0][found[0]] = tirx.Cast(kind, i)
            found[0] += wide(1)

    return opaque(
        "repeat_interleave", body, [repeats, total], lambda n: [(n[1], kind)], [count, size]
    )
