"""Distinct slices of a tensor along an axis: sorted as words are, then one of each run kept."""

from __future__ import annotations

from typing import Any

import torch

from .common import (
    Unsupported,
    cast,
    converts,
    dtype,
    emit,
    ndim,
    normalize_axis,
    op,
    product,
    relax,
    reshape,
    shape,
    tirx,
)
from .data_dependent import as_size, counter
from .opaque import T, fill, local, loops, opaque, wide
from .statements import keep

aten = torch.ops.aten

# What TVM's code for a kernel of statements cannot compare is compared as another dtype.
_COMPARED = {"bool": "uint8", "float16": "float32", "bfloat16": "float32"}


def _precedes(x: Any, left: Any, right: Any, length: Any) -> Any:
    """Whether a slice comes before another one: the first elements that differ decide.

    NaN is neither smaller nor larger, as in eager.
    """
    verdict, column = local("int64"), local("int64")
    verdict[0] = column[0] = wide(0)
    with T.While(tirx.And(column[0] < length, verdict[0].equal(wide(0)))):
        a, b = x[left * length + column[0]], x[right * length + column[0]]
        larger = tirx.Select(b < a, wide(-1), wide(0))
        verdict[0] = tirx.Select(a < b, wide(1), larger)
        column[0] = column[0] + 1
    return verdict[0] > wide(0)


def _sorted(x: Any, count: Any, length: Any) -> Any:
    """The numbers of slices in ascending order, by merging ever longer runs."""

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        total, columns = (wide(n) for n in numbers)
        order, merged = outs
        fill(order, numbers[0], lambda i: i)
        width = local("int64")
        width[0] = wide(1)
        with T.While(width[0] < total):
            start = counter()
            with T.While(start[0] < total):
                middle = keep(tirx.min(start[0] + width[0], total))
                end = keep(tirx.min(start[0] + width[0] * 2, total))
                left, right = local("int64"), local("int64")
                left[0], right[0] = start[0], middle
                with loops([end - start[0]]) as (k,):
                    takes = local("bool")
                    takes[0] = right[0] < end
                    with T.If(tirx.And(left[0] < middle, right[0] < end)), T.Then():
                        takes[0] = _precedes(ins[0], order[right[0]], order[left[0]], columns)
                    with T.If(takes[0]):
                        with T.Then():
                            merged[start[0] + k] = order[right[0]]
                            right[0] = right[0] + 1
                        with T.Else():
                            merged[start[0] + k] = order[left[0]]
                            left[0] = left[0] + 1
                start[0] = end
            with loops([numbers[0]]) as (i,):
                order[i] = merged[i]
            width[0] = width[0] * 2

    def room(n: list[Any]) -> list[Any]:
        return [(n[0], "int64"), (n[0], "int64")]

    return emit(relax.TupleGetItem(opaque("sort_slices", body, [x], room, [count, length]), 0))


def distinct(self: Any, dim: int, sort: bool) -> tuple[Any, Any, Any]:
    """One of each run of equal slices, where each slice went, and how many there were.

    Args:
        self: a tensor of at least one axis.
        dim: the axis.
        sort: bring the slices into order first.
    """
    rank, sizes, kind = ndim(self), shape(self), dtype(self)
    if rank == 0:
        raise Unsupported("a 0-d tensor, as in eager")
    axis = normalize_axis(dim, rank)
    rest = [s for a, s in enumerate(sizes) if a != axis]
    if any(isinstance(s, int) and s == 0 for s in rest):
        raise Unsupported("other axes of no elements, as in eager")
    order = [axis, *(a for a in range(rank) if a != axis)]
    front = op.permute_dims(self, order) if axis else self
    count, length = sizes[axis], product(rest)
    compared = _COMPARED.get(kind, kind)
    x = emit(cast(front, compared))
    places = _sorted(x, count, length) if sort else None

    def at(ins: Any, i: Any) -> Any:
        return ins[1][i] if sort else i

    def differs(ins: Any, i: Any, columns: Any) -> Any:
        """Whether the i-th slice in order is another one than that before it."""
        other, column = local("bool"), counter()
        other[0] = i.equal(wide(0))
        here, before = keep(at(ins, i)), keep(at(ins, tirx.max(i - 1, wide(0))))
        with T.While(tirx.And(column[0] < columns, tirx.Not(other[0]))):
            same = tirx.EQ(ins[0][here * columns + column[0]], ins[0][before * columns + column[0]])
            other[0] = tirx.Select(same, wide(0), wide(1)).equal(wide(1))
            column[0] = column[0] + 1
        return other[0]

    def measure(ins: Any, outs: Any, numbers: list[Any]) -> None:
        outs[0][0] = wide(0)
        with loops([numbers[0]]) as (i,):
            outs[0][0] += tirx.Cast("int64", differs(ins, i, wide(numbers[1])))

    inputs = [x] if places is None else [x, places]
    numbers = [count, length]
    found = as_size(opaque("count_slices", measure, inputs, lambda _: [(1, "int64")], numbers))

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        values, inverse, counts = outs
        columns = wide(numbers[1])
        run = counter()
        with loops([numbers[0]]) as (i,):
            here = keep(at(ins, i))
            with T.If(differs(ins, i, columns)), T.Then():
                with loops([columns]) as (c,):
                    values[run[0] * columns + c] = ins[0][here * columns + c]
                counts[run[0]] = wide(0)
                run[0] += wide(1)
            inverse[here] = run[0] - wide(1)
            counts[run[0] - wide(1)] += wide(1)

    def room(n: list[Any]) -> list[Any]:
        return [(n[2] * n[1], compared), (n[0], "int64"), (n[2], "int64")]

    results = emit(opaque("unique_slices", body, inputs, room, [*numbers, found]))
    values, inverse, counts = (emit(relax.TupleGetItem(results, k)) for k in range(3))
    values = reshape(values, [found, *rest])
    if axis:
        values = op.permute_dims(values, [order.index(a) for a in range(rank)])
    return cast(values, kind), inverse, counts


@converts(aten.unique_dim.default)
def unique_dim(
    self: Any,
    dim: int,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[Any, Any, Any]:
    """Distinct slices in ascending order; one that holds NaN differs from every other."""
    return distinct(self, dim, True)


@converts(aten.unique_dim_consecutive.default)
def unique_dim_consecutive(
    self: Any, dim: int, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Any, Any, Any]:
    """One of each run of equal neighbouring slices."""
    return distinct(self, dim, False)
