"""Sums, products, means, variances and norms over axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fx2relax import bounds, dtypes

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
    scalar,
    shape,
    shape_expr,
    te,
    te_call,
    tirx,
    topi,
)

aten = torch.ops.aten

_HALF = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def wide(x: Any) -> Any:
    """Half precision as float32, which eager accumulates in; all else unchanged."""
    x = emit(x)
    return emit(cast(x, "float32")) if dtype(x) in _HALF else x


def axes(x: Any, dim: Any) -> list[int]:
    """The axes of a reduction, none negative; None and an empty list mean all of them."""
    rank = ndim(x)
    if isinstance(dim, int):
        dim = [dim]
    if not dim:
        return list(range(rank))
    return [normalize_axis(d, rank) for d in dim] if rank else []


def reduced_shape(x: Any, dims: Sequence[int], keepdim: bool) -> list[Any]:
    """The sizes that are left."""
    return [1 if i in dims else s for i, s in enumerate(shape(x)) if keepdim or i not in dims]


def full(sizes: Sequence[Any], value: float, kind: str) -> Any:
    """A tensor of one value."""
    if not math.isfinite(value):  # which TVM's rule for `R.full` fails on
        return op.broadcast_to(scalar(value, kind), shape_expr(sizes))
    return op.full(shape_expr(sizes), scalar(value, kind), kind)


def _te_scaled_sum(x: Any, dims: Sequence[int], keepdim: bool, correction: float) -> Any:
    total = topi.sum(x, list(dims), keepdim)
    n = tirx.Cast(str(x.dtype), product([x.shape[d] for d in dims]))
    divisor = tirx.max(n - tirx.const(correction, str(x.dtype)), tirx.const(0, str(x.dtype)))
    return te.compute(total.shape, lambda *i: total(*i) / divisor, name="scaled_sum")


def scaled_sum(x: Any, dims: Sequence[int], keepdim: bool, correction: float) -> Any:
    """``sum(x) / max(n - correction, 0)``; a divisor of zero gives NaN or infinity."""
    if not dims:
        total, n = x, 1
    else:
        n = product([shape(x)[d] for d in dims])
        if not isinstance(n, int):  # the size is known to a kernel over `x` only
            return te_call(_te_scaled_sum, x, list(dims), keepdim, correction)
        total = op.sum(x, list(dims), keepdims=keepdim)
    return _scaled(total, n, correction)


def _scaled(total: Any, n: int, correction: float) -> Any:
    """A sum of `n` numbers divided by that less a correction."""
    divisor = max(n - correction, 0)
    if divisor == 0:  # TVM refuses a constant divisor of zero
        return op.multiply(total, scalar(float("inf"), dtype(total)))
    return op.divide(total, scalar(divisor, dtype(total)))


# -- sum, product, mean ------------------------------------------------------------------------


def _accumulate(
    reduce: Callable[..., Any], identity: float, x: Any, dim: Any, keepdim: bool, kind: Any
) -> Any:
    if kind is not None:
        result = dtypes.to_tvm(kind)
    else:
        result = dtype(x) if is_float(x) else "int64"
    if result == "bool":
        x = emit(cast(x, "bool"))
        return _logical(identity != 0, x, axes(x, dim), keepdim)
    x = wide(cast(x, result))
    dims = axes(x, dim)
    if ndim(x) == 0:
        return cast(x, result)
    if any(s == 0 for s in shape(x)):
        return full(reduced_shape(x, dims, keepdim), identity, result)
    return cast(reduce(x, dims, keepdim), result)


@converts(aten.sum.dim_IntList)
def sum_dim(self: Any, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Sum; integers and booleans add up in int64, half precision in float32."""
    return _accumulate(op.sum, 0, self, dim, keepdim, dtype)


@converts(aten.sum.default)
def sum_all(self: Any, *, dtype: Any = None) -> Any:
    """Sum of all elements."""
    return _accumulate(op.sum, 0, self, None, False, dtype)


@converts(aten.prod.dim_int)
def prod_dim(self: Any, dim: int, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Product; integers and booleans multiply in int64, half precision in float32."""
    return _accumulate(op.prod, 1, self, [dim], keepdim, dtype)


@converts(aten.prod.default)
def prod_all(self: Any, *, dtype: Any = None) -> Any:
    """Product of all elements."""
    return _accumulate(op.prod, 1, self, None, False, dtype)


@converts(aten.mean.dim)
def mean_dim(self: Any, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Mean; the mean of nothing is NaN."""
    return _accumulate(op.mean, float("nan"), self, dim, keepdim, dtype)


@converts(aten.mean.default)
def mean_all(self: Any, *, dtype: Any = None) -> Any:
    """Mean of all elements."""
    return mean_dim(self, None, dtype=dtype)


# -- variance ----------------------------------------------------------------------------------


def variance_and_mean(x: Any, dims: Sequence[int], correction: Any, keepdim: bool) -> Any:
    """Variance by two passes, which large means do not spoil, and mean; in the dtype of `x`."""
    kind = dtype(x)
    correction = 1 if correction is None else correction
    if any(s == 0 for s in shape(x)):
        nothing = full(reduced_shape(x, dims, keepdim), float("nan"), kind)
        return nothing, nothing
    mean = _mean(x, dims) if ndim(x) else x
    if not dims or any(not isinstance(shape(x)[d], int) for d in dims):
        deviation = emit(op.subtract(x, mean))
        squares = emit(op.multiply(deviation, deviation))
        variance = scaled_sum(squares, dims, keepdim, correction)
    else:
        total = _sum_of_deviations(x, mean, dims, square=True)
        variance = _scaled(total, product([shape(x)[d] for d in dims]), correction)
        if not keepdim:
            variance = op.squeeze(variance, list(dims))
    if not keepdim and dims:
        mean = op.squeeze(mean, list(dims))
    return variance, mean


def _mean(x: Any, dims: Sequence[int]) -> Any:
    """Mean over axes that are kept; values that are all equal have exactly theirs.

    What is left of a rounded mean would be their deviation, and its reciprocal a gradient.
    """
    if not dims:
        return x
    if not all(bounds.provable(bounds.wide(shape(x)[d]) > 0) for d in dims):
        return emit(op.mean(x, list(dims), keepdims=True))
    starts, ends = [0] * len(dims), [1] * len(dims)
    first = emit(op.strided_slice(x, list(dims), starts, ends, assume_inbound=True))
    count = product([shape(x)[d] for d in dims])
    if not isinstance(count, int):
        return emit(op.add(first, op.mean(op.subtract(x, first), list(dims), keepdims=True)))
    total = _sum_of_deviations(x, first, dims, square=False)
    return emit(op.add(first, op.divide(total, scalar(count, dtype(x)))))


def _sum_of_deviations(x: Any, base: Any, dims: Sequence[int], square: bool) -> Any:
    """Sum of ``x - base``, or of its square, over axes that are kept; `base` has size 1 there.

    One kernel: TVM fuses a difference with its sum only where nothing else has been fused before.
    """

    def kernel(values: Any, bases: Any) -> Any:
        turns = {d: te.reduce_axis((0, values.shape[d]), name=f"k{d}") for d in dims}
        zero = tirx.const(0, "int64")

        def element(*at: Any) -> Any:
            here = values(*[turns.get(d, i) for d, i in enumerate(at)])
            apart = here - bases(*[zero if d in turns else i for d, i in enumerate(at)])
            return te.sum(apart * apart if square else apart, axis=list(turns.values()))

        return te.compute(bases.shape, element, name="sum_of_deviations")

    return emit(te_call(kernel, x, base, primfunc_name_hint="sum_of_deviations"))


def _moments(self: Any, dim: Any, correction: Any, keepdim: bool, root: bool) -> Any:
    variance, mean = variance_and_mean(wide(self), axes(self, dim), correction, keepdim)
    spread = op.sqrt(variance) if root else variance
    return cast(spread, dtype(self)), cast(mean, dtype(self))


def _register_moments(name: str, root: bool, both: bool) -> None:
    packet = getattr(aten, name)

    def give(result: tuple[Any, Any]) -> Any:
        return result if both else result[0]

    @converts(packet.correction)
    def with_correction(
        self: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False
    ) -> Any:
        """Divides by the count less `correction` (1), but by no less than zero."""
        return give(_moments(self, dim, correction, keepdim, root))

    @converts(packet.dim)
    def with_dim(self: Any, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Any:
        return give(_moments(self, dim, int(unbiased), keepdim, root))

    @converts(packet.default)
    def of_all(self: Any, unbiased: bool = True) -> Any:
        return give(_moments(self, None, int(unbiased), False, root))


for _name in ("var", "std", "var_mean", "std_mean"):
    _register_moments(_name, root=_name.startswith("std"), both=_name.endswith("mean"))


# -- truth -------------------------------------------------------------------------------------


def _logical(every: bool, x: Any, dims: Sequence[int], keepdim: bool) -> Any:
    if not dims:
        return x
    if any(s == 0 for s in shape(x)):
        return full(reduced_shape(x, dims, keepdim), every, "bool")
    return te_call(topi.all if every else topi.any, x, list(dims), keepdim)


def _truth(every: bool, x: Any, dims: Sequence[int], keepdim: bool) -> Any:
    kind = dtype(x)
    result = _logical(every, emit(cast(x, "bool")), dims, keepdim)
    return cast(result, "uint8") if kind == "uint8" else result


def _register_truth(name: str, every: bool) -> None:
    packet = getattr(aten, name)

    @converts(packet.default)
    def of_all(self: Any) -> Any:
        """NaN is true; uint8 gives uint8."""
        return _truth(every, self, axes(self, None), False)

    @converts(packet.dim)
    def with_dim(self: Any, dim: int, keepdim: bool = False) -> Any:
        return _truth(every, self, axes(self, [dim]), keepdim)

    @converts(packet.dims)
    def with_dims(self: Any, dim: Any = None, keepdim: bool = False) -> Any:
        """An empty list of axes reduces none of them; None reduces all."""
        empty = dim is not None and not len(dim)
        return _truth(every, self, [] if empty else axes(self, dim), keepdim)


_register_truth("any", every=False)
_register_truth("all", every=True)
