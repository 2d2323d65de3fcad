"""Histograms of points: bins along each of their coordinates, and how many fall into each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .casts import clone
from .common import (
    Unsupported,
    converts,
    dtype,
    emit,
    op,
    product,
    relax,
    reshape,
    shape,
    tirx,
)
from .opaque import T, fill, local, loops, opaque, require, wide
from .statements import keep

aten = torch.ops.aten


def _points(x: Any, weight: Any) -> tuple[Any, Any, Any, int]:
    """Points as rows, their weights, how many there are, and the number of coordinates."""
    sizes = shape(x)
    if dtype(x) not in ("float32", "float64") or not sizes or not isinstance(sizes[-1], int):
        raise Unsupported("what eager refuses, or an unknown number of coordinates")
    if weight is not None:
        if dtype(weight) != dtype(x) or len(shape(weight)) != len(sizes) - 1:
            raise Unsupported("weights of another dtype or shape")
        weight = reshape(weight, [product(shape(weight))])
    count = product(sizes[:-1])
    return reshape(x, [count, sizes[-1]]), weight, count, sizes[-1]


def _bounds(given: Sequence[float] | None, rank: int) -> list[tuple[float, float] | None]:
    """The range of each coordinate, or None where the data decides."""
    if given is None:
        return [None] * rank
    pairs = [(float(a), float(b)) for a, b in zip(given[::2], given[1::2], strict=False)]
    if len(given) != 2 * rank or not all(-math.inf < a <= b < math.inf for a, b in pairs):
        raise Unsupported("ranges that eager refuses")
    return list(pairs)


def _fill_evenly(out: Any, low: Any, high: Any, count: Any) -> None:
    """Write so many steps from one number to another, as eager's linspace does.

    They are counted from the nearer end, and rounded once: what lies on an edge must stay there.
    """
    kind = str(low.ty.dtype)
    step = keep((high - low) / tirx.Cast(kind, count))
    fused = "fmaf" if kind == "float32" else "fma"

    def edge(i: Any) -> Any:
        near = i < wide(count + 1) // 2
        steps = tirx.Cast(kind, tirx.Select(near, i, i - wide(count)))
        return tirx.call_pure_extern(kind, fused, step, steps, tirx.Select(near, low, high))

    fill(out, count + 1, edge)


def _edges(
    x: Any, count: Any, bins: Sequence[Any], bounds: Sequence[tuple[float, float] | None]
) -> list[Any]:
    """The edges of equal bins for each coordinate; those of no data go from 0 to 1."""
    kind, rank = dtype(x), len(bins)
    if any(isinstance(b, int) and b <= 0 for b in bins):
        raise Unsupported("no bins, as in eager")

    def number(value: float) -> Any:
        return tirx.const(value, kind)

    def extent(points: Any, total: Any, axis: int) -> tuple[Any, Any]:
        low, high, odd = local(kind), local(kind), local("int64")
        low[0], high[0], odd[0] = number(0.0), number(1.0), wide(0)
        with T.If(wide(total) > wide(0)), T.Then():
            low[0] = high[0] = points[wide(axis)]
        with loops([total]) as (i,):
            value = points[i * rank + axis]
            low[0] = tirx.Select(value < low[0], value, low[0])
            high[0] = tirx.Select(value > high[0], value, high[0])
            finite = tirx.abs(value) <= tirx.max_value(kind)
            odd[0] = odd[0] + tirx.Select(finite, wide(0), wide(1))
        message = f"torch.histogramdd: dimension {axis}'s range is not finite"
        require(odd[0].equal(wide(0)), message)
        return low[0], high[0]

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        for axis, (total, given) in enumerate(zip(numbers[1:], bounds, strict=True)):
            low, high = local(kind), local(kind)
            if given is None:
                low[0], high[0] = extent(ins[0], numbers[0], axis)
            else:
                low[0], high[0] = number(given[0]), number(given[1])
            with T.If(tirx.EQ(low[0], high[0])), T.Then():
                low[0] = low[0] - number(0.5)
                high[0] = high[0] + number(0.5)
            _fill_evenly(outs[axis], low[0], high[0], total)

    def room(n: list[Any]) -> list[Any]:
        return [(b + 1, kind) for b in n[1:]]

    found = opaque("bin_edges", body, [x], room, [count, *bins])
    if rank == 1:
        return [found]
    found = emit(found)
    return [emit(relax.TupleGetItem(found, k)) for k in range(rank)]


def _upper_bound(edges: Any, value: Any, low: Any, high: Any) -> Any:
    """The first of some edges that is larger than a value, by halving; they may be in any order."""
    first, left = local("int64"), local("int64")
    first[0], left[0] = low, high - low
    with T.While(left[0] > wide(0)):
        step = keep(left[0] // 2)
        beyond = keep(value < edges[first[0] + step])
        first[0] = tirx.Select(beyond, first[0], first[0] + step + 1)
        left[0] = tirx.Select(beyond, step, left[0] - step - 1)
    return first[0]


def _histogram(
    x: Any, weight: Any, count: Any, edges: Sequence[Any], equal: bool, density: bool
) -> Any:
    """The weight of the points in each bin; the last edge belongs to the last bin.

    `equal`: the bins are equally wide, so that a bin's place is known but for rounding.
    """
    kind, rank = dtype(x), len(edges)
    bins = [shape(e)[0] - 1 for e in edges]
    if any(isinstance(b, int) and b <= 0 for b in bins):
        raise Unsupported("no bins, as in eager")

    def place(value: Any, sides: Any, total: Any) -> Any:
        low, high = wide(0), wide(total + 1)
        if equal:
            width = sides[wide(total)] - sides[wide(0)]
            guess = (value - sides[wide(0)]) * tirx.Cast(kind, total) / width
            near = keep(tirx.Cast("int64", guess))
            low, high = keep(tirx.max(near - 1, low)), keep(tirx.min(near + 2, high))
        found = _upper_bound(sides, value, low, high)
        return keep(tirx.min(found - 1, wide(total) - 1))

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        points, totals = ins[0], numbers[1:]
        sides = ins[1 : 1 + rank]
        fill(outs[0], product(totals), lambda _: tirx.const(0.0, kind))
        with loops([numbers[0]]) as (i,):
            inside: Any = tirx.const(True, "bool")
            for axis, total in enumerate(totals):
                value = points[i * rank + axis]
                within = tirx.And(value >= sides[axis][wide(0)], value <= sides[axis][wide(total)])
                inside = tirx.And(inside, within)
            with T.If(inside), T.Then():
                at: Any = wide(0)
                for axis, total in enumerate(totals):
                    at = at * wide(total) + place(points[i * rank + axis], sides[axis], total)
                bin_index = keep(at)
                more = tirx.const(1.0, kind) if weight is None else ins[1 + rank][i]
                outs[0][bin_index] = outs[0][bin_index] + more

    operands = [x, *edges] if weight is None else [x, *edges, weight]
    flat = opaque("histogram", body, operands, lambda n: [(product(n[1:]), kind)], [count, *bins])
    result = reshape(flat, bins)
    if not density:
        return result
    result = op.divide(result, op.sum(result))
    for axis, side in enumerate(edges):
        ends = op.strided_slice(side, [0], [1], [bins[axis] + 1])
        starts = op.strided_slice(side, [0], [0], [bins[axis]])
        widths = [b if k == axis else 1 for k, b in enumerate(bins)]
        result = op.divide(result, reshape(op.subtract(ends, starts), widths))
    return result


@converts(aten._histogramdd_bin_edges.default)
def histogramdd_bin_edges(
    self: Any, bins: Any, *, range: Any = None, weight: Any = None, density: bool = False
) -> tuple[Any, ...]:
    """A vector of edges for each coordinate; RuntimeError where the data's range is not finite."""
    x, _, count, rank = _points(self, None)
    if len(bins) != rank:
        raise Unsupported("another number of coordinates")
    return tuple(_edges(x, count, bins, _bounds(range, rank)))


@converts(aten._histogramdd_from_bin_cts.default)
def histogramdd_from_bin_cts(
    self: Any, bins: Any, *, range: Any = None, weight: Any = None, density: bool = False
) -> Any:
    """The histogram over equal bins."""
    x, weight, count, rank = _points(self, weight)
    if len(bins) != rank:
        raise Unsupported("another number of coordinates")
    edges = _edges(x, count, bins, _bounds(range, rank))
    return _histogram(x, weight, count, edges, True, density)


@converts(aten._histogramdd_from_bin_tensors.default)
def histogramdd_from_bin_tensors(
    self: Any, bins: Any, *, weight: Any = None, density: bool = False
) -> Any:
    """The histogram over bins with given edges."""
    x, weight, count, rank = _points(self, weight)
    if len(bins) != rank or any(dtype(b) != dtype(x) or len(shape(b)) != 1 for b in bins):
        raise Unsupported("edges of another dtype or number")
    return _histogram(x, weight, count, [emit(b) for b in bins], False, density)


def _column(x: Any) -> Any:
    return reshape(x, [product(shape(x)), 1])


def _flat(weight: Any, x: Any) -> Any:
    if weight is None:
        return None
    if len(shape(weight)) != len(shape(x)):
        raise Unsupported("weights of another shape")
    return reshape(weight, [product(shape(weight))])


@converts(aten.histogram.bin_ct)
def histogram(
    self: Any,
    bins: int = 100,
    *,
    range: Any = None,
    weight: Any = None,
    density: bool = False,
) -> tuple[Any, Any]:
    """The histogram of all elements over equal bins, and the edges of these."""
    x, weight, count, _ = _points(_column(self), _flat(weight, self))
    edges = _edges(x, count, [bins], _bounds(range, 1))
    return _histogram(x, weight, count, edges, True, density), edges[0]


@converts(aten.histogram.bins_tensor)
def histogram_bins(
    self: Any, bins: Any, *, weight: Any = None, density: bool = False
) -> tuple[Any, Any]:
    """The histogram of all elements over bins with given edges, and a copy of these."""
    x, weight, count, _ = _points(_column(self), _flat(weight, self))
    if dtype(bins) != dtype(x) or len(shape(bins)) != 1:
        raise Unsupported("edges of another dtype")
    return _histogram(x, weight, count, [emit(bins)], False, density), clone(bins)
