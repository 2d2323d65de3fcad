"""Tensors, sizes and Python numbers as Relax tensors of a dtype, converted as eager converts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fx2relax import dtypes
from fx2relax.compat import (
    BlockBuilder,
    Expr,
    TensorType,
    const_number,
    dtype_of,
    is_prim_expr,
    op,
    relax,
    te,
    tirx,
)

__all__ = ["Statistic", "cast", "last", "resized", "scalar", "size_tensor", "unshaped"]


@dataclass(frozen=True)
class Statistic:
    """A result in the dtype that it was computed in, to be rounded to the one that PyTorch gives.

    What eager keeps for a gradient has the input's dtype on a processor; on a GPU, float32.
    """

    value: Any


def cast(value: Any, dtype: str) -> Any:
    """A Relax tensor, size or Python number as a Relax tensor of a dtype; others unchanged.

    A float out of an integer's range, or NaN, gives what x86's conversions give in eager.
    """
    number = const_number(value)
    if number is not None:
        return scalar(number, dtype)
    if isinstance(value, Expr) and not is_prim_expr(value):
        value = BlockBuilder.current().normalize(value)
        source = dtype_of(value)
        if source == dtype:
            return value
        if "float" in source and "int" in dtype:
            return _to_integer(value, dtype)
        return op.astype(value, dtype)
    if isinstance(value, Expr):
        return size_tensor(value, dtype)
    if isinstance(value, (bool, int, float)):
        return scalar(value, dtype)
    return value


def unshaped(value: Any) -> Any:
    """The tensor itself, whose sizes TVM no longer knows."""
    kept = TensorType(dtype=dtype_of(value), ndim=value.ty.ndim)
    # The one packed function of which the memory planner knows that its result is its operand.
    return op.call_pure_packed("vm.builtin.reshape", value, value.ty.shape, ty_args=[kept])


def resized(value: Any, sizes: Sequence[Any], name: str = "") -> Any:
    """The tensor under other sizes, which are compared when the program runs.

    TVM must not learn that a symbol equals an expression of itself: it would put one in the other
    until its stack ends.
    """
    builder = BlockBuilder.current()
    hidden = builder.emit(unshaped(builder.emit(value)))
    return builder.match_cast(hidden, TensorType(list(sizes), dtype_of(value)), name)


def last(value: Any, after: Sequence[Any]) -> Any:
    """A result itself, once what stands in `after` has been computed; nothing may follow it."""
    whole = relax.Tuple([value, *after])
    builtin = "vm.builtin.tuple_getitem"
    return op.call_pure_packed(builtin, whole, relax.prim_value(0), ty_args=[value.ty])


def scalar(value: bool | int | float, dtype: str) -> Any:
    """A 0-d constant, converted as PyTorch converts a Python number to the dtype."""
    # Through the widest dtype of its kind: a Python float is a double, not a float32.
    wide = torch.float64 if isinstance(value, float) else None
    tensor = torch.tensor(value, dtype=wide).to(dtypes.to_torch(dtype))
    if dtype == "bfloat16" or dtype.startswith("float8"):
        return op.astype(relax.const(float(tensor), "float32"), dtype)
    return relax.const(tensor.numpy(), dtype)


def size_tensor(value: Any, dtype: str) -> Any:
    """A size, or a number computed from sizes, as a 0-d tensor."""

    def compute(number: Any) -> Any:
        return te.compute((), lambda *_: _wrapped(number, dtype), name="size")

    return BlockBuilder.current().emit_te(compute, value)


def _to_integer(x: Any, dtype: str) -> Any:
    builder = BlockBuilder.current()
    if dtype_of(x) in ("float16", "bfloat16") or dtype_of(x).startswith("float8"):
        x = op.astype(x, "float32")

    def kernel(t: Any) -> Any:
        return te.compute(t.shape, lambda *at: _wrapped(t(*at), dtype), name="to_integer")

    name = f"to_{dtype}"
    return builder.emit_te(kernel, builder.emit(x), primfunc_name_hint=name)


def _wrapped(value: Any, dtype: str) -> Any:
    """A TIR number as another dtype; x86 converts to a wide integer and drops the high bits."""
    if "float" not in str(value.ty.dtype) or "int" not in dtype:
        return tirx.Cast(dtype, value)
    if dtype == "uint64":
        return _to_uint64(value)
    wide = "int32" if dtype in ("int32", "int16", "int8", "uint16") else "int64"
    exact = _saturated(value, wide)
    return exact if wide == dtype else tirx.Cast(dtype, exact)


def _saturated(value: Any, dtype: str) -> Any:
    """A float as int32 or int64; the least integer for what lies outside, and for NaN."""
    bits = int(dtype[3:])
    limit = tirx.const(float(2 ** (bits - 1)), str(value.ty.dtype))
    # A double just above -2**31 - 1 truncates into int32; a float32 there does not exist.
    lowest = limit + tirx.const(1.0, str(value.ty.dtype)) if bits == 32 else limit
    low = value > -lowest if str(value.ty.dtype) == "float64" and bits == 32 else value >= -limit
    inside = tirx.And(low, value < limit)
    return tirx.Select(inside, tirx.Cast(dtype, value), tirx.min_value(dtype))


def _to_uint64(value: Any) -> Any:
    half = tirx.const(2.0**63, str(value.ty.dtype))
    low = _saturated(value, "int64")
    high = _saturated(value - half, "int64") ^ tirx.min_value("int64")
    return tirx.reinterpret("uint64", tirx.Select(value >= half, high, low))
