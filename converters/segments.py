"""Reductions of segments of an axis, given by their lengths or by where they start and end."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .common import Unsupported, cast, converts, dtype, is_float, product, reshape, shape, tirx
from .opaque import T, fill, is_large, local, loops, opaque, require, wide
from .reductions import wide as half_to_float
from .statements import keep

aten = torch.ops.aten

_ALIASES = {"amax": "max", "amin": "min"}
_EMPTY = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf}


class _Segments:
    """How an axis of a tensor is divided.

    Attributes:
        ends: for each row of what stands before the axis, where its segments start, and where the
            last one ends; flat int64.
        outer, size, inner: the number of elements before the axis, on it and after it.
        count: the number of segments of a row.
        sizes: the shape of a result with one element for each segment.
    """

    def __init__(self, data: Any, lengths: Any, offsets: Any, axis: int, unsafe: bool) -> None:
        given = lengths if offsets is None else offsets
        if given is None or not is_float(data) or dtype(given) not in ("int32", "int64"):
            raise Unsupported("arguments that eager refuses")
        rank = len(shape(data))
        axis += rank if axis < 0 else 0
        if len(shape(given)) != axis + 1 or axis >= rank:
            raise Unsupported("another axis than the last one of the lengths")
        self.sizes = list(shape(data))
        self.outer, self.inner = product(self.sizes[:axis]), product(self.sizes[axis + 1 :])
        self.size, self.count = self.sizes[axis], shape(given)[axis]
        if offsets is not None:
            self.count = self.count - 1
        self.sizes[axis] = self.count
        self.numbers = [self.outer, self.size, self.inner, self.count]
        if offsets is None:
            self.ends = self._of_lengths(lengths, unsafe)
        else:
            self.ends = self._of_offsets(offsets)

    def _of_lengths(self, lengths: Any, unsafe: bool) -> Any:
        message = "Expected all rows of lengths along axis to sum to data.size when !unsafe."

        def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
            outer, size, _, count = numbers
            with loops([outer]) as (o,):
                end, least = local("int64"), local("int64")
                end[0] = least[0] = wide(0)
                outs[0][o * (count + 1)] = wide(0)
                with loops([count]) as (s,):
                    length = wide(ins[0][o * count + s])
                    least[0] = tirx.min(least[0], length)
                    end[0] = end[0] + length
                    outs[0][o * (count + 1) + s + 1] = end[0]
                require(least[0] >= wide(0), "lengths contains negative value!")
                # Eager would read beyond the data.
                fits = end[0] <= wide(size) if unsafe else end[0].equal(wide(size))
                require(fits, f"segment_reduce(): {message}")

        return self._ends(body, lengths)

    def _of_offsets(self, offsets: Any) -> Any:
        def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
            outer, size, _, count = numbers
            with loops([outer, count + 1]) as (o, s):
                at = o * (count + 1) + s
                outs[0][at] = wide(ins[0][at])
                before = wide(ins[0][tirx.max(at - 1, wide(0))])
                length = tirx.Select(s > wide(0), wide(ins[0][at]) - before, wide(0))
                require(length >= wide(0), "Expected segment_length >= 0")
                inside = tirx.And(outs[0][at] >= wide(0), outs[0][at] <= wide(size))
                require(inside, "segment_reduce(): an offset lies outside of the data")

        return self._ends(body, offsets)

    def _ends(self, body: Any, given: Any) -> Any:
        def room(n: list[Any]) -> list[Any]:
            return [(n[0] * (n[3] + 1), "int64")]

        return opaque("segment_ends", body, [given], room, self.numbers)

    def each(
        self, ends: Any, numbers: list[Any], body: Callable[[Any, Any, Callable[..., Any]], None]
    ) -> None:
        """``body(place, length, at)`` for every segment: its place among the results, its length,
        and where in the data its k-th element lies.
        """
        outer, size, inner, count = numbers
        whole = product([outer, inner, count])
        with loops([outer, count, inner], parallel=1 if is_large(whole) else None) as (o, s, i):
            start = local("int64")
            start[0] = ends[o * (count + 1) + s]
            length = local("int64")
            length[0] = ends[o * (count + 1) + s + 1] - start[0]
            first = local("int64")
            first[0] = (o * size + start[0]) * inner + i
            body((o * count + s) * inner + i, length[0], lambda k: first[0] + k * inner)


def _reduction(name: str) -> str:
    name = _ALIASES.get(name, name)
    if name not in _EMPTY:
        raise Unsupported(f"the reduction {name!r}")
    return name


def _better(name: str, old: Any, new: Any) -> Any:
    """The old maximum or minimum, or a new element that wins; NaN wins, and stays."""
    wins = old < new if name == "max" else new < old
    return tirx.Select(tirx.Or(tirx.isnan(new), wins), new, old)


@converts(aten.segment_reduce.default)
def segment_reduce(
    data: Any,
    reduce: str,
    *,
    lengths: Any = None,
    indices: Any = None,
    offsets: Any = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Any = None,
) -> Any:
    """One number for each segment; the mean of an empty one is NaN.

    Lengths that are negative or add up to another size are errors.
    """
    if indices is not None:
        raise Unsupported("segments by indices")
    name, kind = _reduction(reduce), dtype(data)
    segments = _Segments(data, lengths, offsets, axis, unsafe)
    x = half_to_float(data)
    wide_kind = dtype(x)
    start = _EMPTY[name] if initial is None else float(initial)

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        def segment(place: Any, length: Any, at: Any) -> None:
            total = local(wide_kind)
            total[0] = tirx.const(start, wide_kind)
            with loops([length]) as (k,):
                value = ins[0][at(k)]
                if name in ("sum", "mean"):
                    total[0] = total[0] + value
                elif name == "prod":
                    total[0] = total[0] * value
                else:
                    total[0] = _better(name, total[0], value)
            if name == "mean":
                empty = math.nan if initial is None else start
                mean = total[0] / tirx.Cast(wide_kind, tirx.max(length, wide(1)))
                total[0] = tirx.Select(length > wide(0), mean, tirx.const(empty, wide_kind))
            outs[0][place] = total[0]

        segments.each(ins[1], numbers, segment)

    def room(n: list[Any]) -> list[Any]:
        return [(n[0] * n[3] * n[2], wide_kind)]

    flat = opaque(f"segment_{name}", body, [x, segments.ends], room, segments.numbers)
    return cast(reshape(flat, segments.sizes), kind)


@converts(aten._segment_reduce_backward.default)
def segment_reduce_backward(
    grad: Any,
    output: Any,
    data: Any,
    reduce: str,
    *,
    lengths: Any = None,
    offsets: Any = None,
    axis: int = 0,
    initial: Any = None,
) -> Any:
    """The gradient of a maximum or minimum goes to all that are equal to it, and to NaNs.

    They share a positive one; a negative one goes to each in full, as in eager.
    """
    name, kind = _reduction(reduce), dtype(data)
    segments = _Segments(data, lengths, offsets, axis, True)
    operands = [half_to_float(t) for t in (grad, output, data)]
    wide_kind = dtype(operands[2])
    start = 1.0 if initial is None else float(initial)

    def number(value: float) -> Any:
        return tirx.const(value, wide_kind)

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        grads, results, x, ends = ins
        fill(outs[0], product(numbers[:3]), lambda _: number(0.0))

        def extreme(place: Any, length: Any, at: Any) -> None:
            ties = local(wide_kind)
            ties[0] = number(0.0)

            def chosen(k: Any) -> Any:
                return tirx.Or(tirx.isnan(x[at(k)]), tirx.EQ(x[at(k)], results[place]))

            with loops([length]) as (k,), T.If(chosen(k)), T.Then():
                ties[0] = ties[0] + number(1.0)
            # Eager divides only what is positive.
            shared = tirx.Select(grads[place] > number(0.0), ties[0], number(1.0))
            share = keep(grads[place] / shared)
            with loops([length]) as (k,), T.If(chosen(k)), T.Then():
                outs[0][at(k)] = share

        def linear(place: Any, length: Any, at: Any) -> None:
            share = local(wide_kind)
            share[0] = grads[place]
            if name == "mean":
                share[0] = share[0] / tirx.Cast(wide_kind, tirx.max(length, wide(1)))
            with loops([length]) as (k,):
                outs[0][at(k)] = share[0]

        def others(place: Any, length: Any, at: Any) -> None:
            with loops([length]) as (k,):
                value = x[at(k)]
                rest = local(wide_kind)
                rest[0] = results[place] / value
                with T.If(tirx.Or(tirx.isnan(value), tirx.EQ(value, number(0.0)))), T.Then():
                    rest[0] = number(start)
                    with loops([length]) as (j,), T.If(tirx.Not(j.equal(k))), T.Then():
                        rest[0] = rest[0] * x[at(j)]
                outs[0][at(k)] = grads[place] * rest[0]

        rules = {"max": extreme, "min": extreme, "sum": linear, "mean": linear, "prod": others}
        segments.each(ends, numbers, rules[name])

    def room(n: list[Any]) -> list[Any]:
        return [(n[0] * n[1] * n[2], wide_kind)]

    inputs = [*operands, segments.ends]
    flat = opaque(f"segment_{name}_backward", body, inputs, room, segments.numbers)
    return cast(reshape(flat, shape(data)), kind)
