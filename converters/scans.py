"""Cumulative sums, products, extremes and log-sum-exps: one pass along an axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fx2relax import dtypes
from fx2relax.compat import IRBuilder, T, const_int
from fx2relax.elements import Elements

from .common import (
    cast,
    converts,
    dtype,
    emit,
    is_float,
    ndim,
    normalize_axis,
    op,
    product,
    relax,
    shape,
    te,
    te_call,
    tirx,
)
from .opaque import local
from .reductions import full, wide

aten = torch.ops.aten

# How a CPU's threads and vectors take several rows at once; see the pipeline's `scans`.
_SCAN = "fx2relax.scan"
# What eager carries along an axis on a CPU.
_CARRY = {"float32": "float64", "float16": "float32", "bfloat16": "float32"}

Step = Callable[[list[Any], Any, Any], list[Any]]


def _te_scan(
    x: Any,
    axis: int,
    carried: Sequence[tuple[str, Any]],
    step: Step,
    kinds: Sequence[str],
    name: str,
) -> Any:
    """One pass along an axis, the rows in parallel.

    `carried` holds the dtype and first value of each variable that is carried along; `step` gives
    their next values from the present ones, the element and its index; `kinds` are the dtypes of
    the outputs, which are the first variables' values after each step.
    """
    before, after = product(x.shape[:axis]), product(x.shape[axis + 1 :])
    length = x.shape[axis]
    beside = const_int(after)
    marks = {_SCAN: beside} if isinstance(beside, int) else {}

    def body(source: Any, results: Sequence[Any]) -> Any:
        with IRBuilder() as builder:
            data = Elements(source)
            outs = [Elements(r) for r in results]
            with T.parallel(0, before * after, annotations=marks) as row:
                start = (row // after) * length * after + row % after
                state = [local(kind) for kind, _ in carried]
                for variable, (_, first) in zip(state, carried, strict=True):
                    variable[0] = first
                with T.serial(0, length) as k:
                    at = start + k * after
                    values = step([s[0] for s in state], data[at], k)
                    # All are computed before any is stored.
                    fresh = [local(kind) for kind, _ in carried]
                    for new, value in zip(fresh, values, strict=True):
                        new[0] = value
                    for variable, new in zip(state, fresh, strict=True):
                        variable[0] = new[0]
                    for out, variable, kind in zip(outs, state, kinds, strict=False):
                        out[at] = tirx.Cast(kind, variable[0])
            return builder.get()

    return te.extern(
        [x.shape] * len(kinds),
        [x],
        lambda ins, outs: body(ins[0], outs),
        dtype=list(kinds),
        name=name,
        tag=name,
    )


def _scan(x: Any, *args: Any) -> Any:
    return te_call(lambda data: _te_scan(data, *args), x, primfunc_name_hint=args[-1])


def _nothing_to_scan(x: Any) -> bool:
    return ndim(x) == 0 or any(s == 0 for s in shape(x))


def _accumulate(name: str, x: Any, dim: int, kind: Any) -> Any:
    """Integers and booleans accumulate in int64, float32 in float64, half in float32."""
    result = dtypes.to_tvm(kind) if kind is not None else dtype(x) if is_float(x) else "int64"
    x = emit(cast(x, "int64" if result == "bool" else result))
    if _nothing_to_scan(x):
        return cast(x, result)
    axis = normalize_axis(dim, ndim(x))
    if dtype(x) not in _CARRY:
        return cast((op.cumsum if name == "cumsum" else op.cumprod)(x, axis), result)
    carry = _CARRY[result]

    def step(state: list[Any], value: Any, _: Any) -> list[Any]:
        value = tirx.Cast(carry, value)
        return [state[0] + value if name == "cumsum" else state[0] * value]

    first = tirx.const(0 if name == "cumsum" else 1, carry)
    return _scan(x, axis, [(carry, first)], step, [result], name)


@converts(aten.cumsum.default)
def cumsum(self: Any, dim: int, *, dtype: Any = None) -> Any:
    """Sum of the elements so far."""
    return _accumulate("cumsum", self, dim, dtype)


@converts(aten.cumprod.default)
def cumprod(self: Any, dim: int, *, dtype: Any = None) -> Any:
    """Product of the elements so far."""
    return _accumulate("cumprod", self, dim, dtype)


def _extreme(self: Any, dim: int, largest: bool) -> Any:
    kind = dtype(self)
    if _nothing_to_scan(self):
        return self, full(shape(self), 0, "int64")
    x = emit(cast(self, "uint8")) if kind == "bool" else wide(self)
    source = dtype(x)

    def step(state: list[Any], value: Any, k: Any) -> list[Any]:
        best, index = state
        follows = value >= best if largest else value <= best
        if "float" in source:
            follows = tirx.any(tirx.isnan(value), tirx.all(tirx.Not(tirx.isnan(best)), follows))
        follows = tirx.any(k == 0, follows)
        position = tirx.Cast("int64", k)
        return [tirx.Select(follows, value, best), tirx.Select(follows, position, index)]

    carried = [(source, tirx.const(0, source)), ("int64", tirx.const(0, "int64"))]
    name = "cummax" if largest else "cummin"
    axis = normalize_axis(dim, ndim(x))
    both = emit(_scan(x, axis, carried, step, [source, "int64"], name))
    return cast(relax.TupleGetItem(both, 0), kind), relax.TupleGetItem(both, 1)


@converts(aten.cummax.default)
def cummax(self: Any, dim: int) -> Any:
    """The largest so far and the last place where it stood; NaN stays."""
    return _extreme(self, dim, largest=True)


@converts(aten.cummin.default)
def cummin(self: Any, dim: int) -> Any:
    """The smallest so far and the last place where it stood; NaN stays."""
    return _extreme(self, dim, largest=False)


@converts(aten.logcumsumexp.default)
def logcumsumexp(self: Any, dim: int) -> Any:
    """Logarithm of the sum of the exponentials so far."""
    kind = dtype(self)
    if _nothing_to_scan(self):
        return self

    def step(state: list[Any], value: Any, _: Any) -> list[Any]:
        total, value = state[0], tirx.Cast("float64", value)
        high, low = (
            tirx.Select(value > total, value, total),
            tirx.Select(value > total, total, value),
        )
        both = high + tirx.log1p(tirx.exp(low - high))
        # Equal infinities have no difference.
        infinite = tirx.all(high == low, tirx.isinf(high))
        nan = tirx.any(tirx.isnan(value), tirx.isnan(total))
        return [tirx.Select(nan, value + total, tirx.Select(infinite, high, both))]

    first = -tirx.infinity("float64")
    axis = normalize_axis(dim, ndim(self))
    return _scan(self, axis, [("float64", first)], step, [kind], "logcumsumexp")
