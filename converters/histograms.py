"""Histograms: how often numbers occur, how many of them fall into bins."""

from __future__ import annotations

import math
from typing import Any

import torch

from .common import Unsupported, cast, converts, dtype, emit, is_float, product, shape, tirx
from .data_dependent import as_size
from .opaque import T, fill, local, loops, opaque, require, wide
from .reductions import wide as half_to_float

aten = torch.ops.aten


@converts(aten.bincount.default)
def bincount(self: Any, weights: Any = None, minlength: Any = 0) -> Any:
    """How often each number occurs, or the sum of its weights; below zero RuntimeError."""
    total = shape(self)[0]
    message = "bincount only supports 1-d non-negative integral inputs."

    def measure(ins: Any, outs: Any, numbers: Any) -> None:
        outs[0][0] = wide(numbers[1])
        least = local("int64")
        least[0] = wide(0)
        with loops([numbers[0]]) as (i,):
            outs[0][0] = tirx.max(outs[0][0], wide(ins[0][i]) + wide(1))
            least[0] = tirx.min(least[0], wide(ins[0][i]))
        require(least[0] >= wide(0), message)

    numbers = [total, minlength]
    size = as_size(opaque("largest", measure, [self], lambda _: [(1, "int64")], numbers))
    kind = "int64" if weights is None else "float64"
    if weights is not None and dtype(weights) == "float32":
        kind = "float32"
    operands = [self] if weights is None else [self, emit(cast(weights, kind))]

    def body(ins: Any, outs: Any, numbers: Any) -> None:
        fill(outs[0], numbers[1], lambda _: tirx.const(0, kind))
        with loops([numbers[0]]) as (i,):
            more = tirx.const(1, kind) if len(ins) == 1 else ins[1][i]
            outs[0][wide(ins[0][i])] = outs[0][wide(ins[0][i])] + more

    return opaque("bincount", body, operands, lambda n: [(n[1], kind)], [total, size])


@converts(aten.histc.default)
def histc(self: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    """How many elements fall into each of equal bins, NaN and what lies outside into none.

    With equal bounds they are the data's; RuntimeError if those are not finite.
    """
    kind = dtype(self)
    if not is_float(self):
        raise Unsupported("integers, as in eager")
    x = half_to_float(self)
    wide_kind, total = dtype(x), product(shape(x))

    def body(ins: Any, outs: Any, numbers: Any) -> None:
        def number(value: float) -> Any:
            return tirx.const(value, wide_kind)

        def rounded(value: Any) -> Any:
            """Half precision is rounded after every step, as in eager."""
            return tirx.Cast(wide_kind, tirx.Cast(kind, value)) if kind != wide_kind else value

        low, high = local(wide_kind), local(wide_kind)
        low[0], high[0] = rounded(number(float(min))), rounded(number(float(max)))
        if min == max:
            with T.If(wide(numbers[0]) > wide(0)), T.Then():
                low[0] = high[0] = ins[0][wide(0)]
            bad = local("int64")
            bad[0] = wide(0)
            with loops([numbers[0]]) as (i,):
                low[0] = tirx.Select(ins[0][i] < low[0], ins[0][i], low[0])
                high[0] = tirx.Select(ins[0][i] > high[0], ins[0][i], high[0])
                finite = tirx.abs(ins[0][i]) <= tirx.max_value(wide_kind)
                bad[0] = bad[0] + tirx.Select(finite, wide(0), wide(1))
            require(bad[0].equal(wide(0)), "histc: the range of the data is not finite")
            with T.If(tirx.EQ(low[0], high[0])), T.Then():
                low[0] = low[0] - number(1.0)
                high[0] = high[0] + number(1.0)
        fill(outs[0], bins, lambda _: number(0.0))
        with loops([numbers[0]]) as (i,):
            value = ins[0][i]
            with T.If(tirx.And(value >= low[0], value <= high[0])), T.Then():
                place = local("int64")
                scaled = rounded(rounded(value - low[0]) * rounded(number(bins)))
                scaled = rounded(scaled / rounded(high[0] - low[0]))
                place[0] = tirx.min(tirx.Cast("int64", scaled), wide(bins - 1))
                outs[0][place[0]] = rounded(outs[0][place[0]] + number(1.0))

    if min != max and not (math.isfinite(min) and math.isfinite(max)):
        raise Unsupported("an infinite range")
    return cast(opaque("histc", body, [x], lambda _: [(bins, wide_kind)], [total]), kind)
