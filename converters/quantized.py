"""Quantised tensors: from floats to integers by a scale and a zero point, and back.

A kernel computes in the steps that PyTorch's own functions take, each of them rounded. Where a
tensor of small integers becomes float32, Relax's own `dequantize` says so: the pipeline then sees
which products are products of integers.
"""

from __future__ import annotations

from typing import Any

import torch

from fx2relax import dtypes
from fx2relax.compat import const_number
from fx2relax.quantized import operators as quantized

from .casts import convert_element_type
from .common import (
    Refused,
    Unsupported,
    cast,
    compute_dtype,
    converts,
    dtype,
    emit,
    ndim,
    normalize_axis,
    op,
    product,
    reshape,
    scalar,
    shape,
    tirx,
)
from .elementwise import elementwise, nan_max, nan_min

#: Integers that float32 holds exactly, and whose differences int32 holds.
SMALL = ("int8", "uint8", "int16", "uint16")
_INTEGERS = (*SMALL, "int32")

converts(quantized.convert_element_type.no_fuse)(convert_element_type)


@converts(quantized.quantize_per_tensor.default)
def quantize_per_tensor(
    input: Any, scale: Any, zero_point: Any, quant_min: Any, quant_max: Any, dtype: Any
) -> Any:
    """``clamp(round(input / scale) + zero_point)`` with numbers for all."""
    if scale == 0:
        raise Refused("a scale of 0")
    return _quantize(input, scalar(1.0 / scale, "float32"), zero_point, quant_min, quant_max, dtype)


@converts(quantized.quantize_per_tensor.tensor, quantized.quantize_per_tensor.tensor2)
def quantize_per_tensor_tensor(
    input: Any, scale: Any, zero_point: Any, quant_min: Any, quant_max: Any, dtype: Any
) -> Any:
    """`quantize_per_tensor` by tensors of one element, whose numbers are those of Python."""
    inverse = op.divide(scalar(1.0, "float64"), cast(_one(scale), "float64"))
    return _quantize(input, cast(inverse, "float32"), zero_point, quant_min, quant_max, dtype)


@converts(quantized.dequantize_per_tensor.default)
def dequantize_per_tensor(
    input: Any,
    scale: Any,
    zero_point: Any,
    quant_min: Any,
    quant_max: Any,
    dtype: Any,
    *,
    out_dtype: Any = None,
) -> Any:
    """``(input - zero_point) * scale`` with numbers for all."""
    return _dequantize(input, scale, zero_point, dtype, out_dtype)


@converts(quantized.dequantize_per_tensor.tensor, quantized.dequantize_per_tensor.tensor2)
def dequantize_per_tensor_tensor(
    input: Any,
    scale: Any,
    zero_point: Any,
    quant_min: Any,
    quant_max: Any,
    dtype: Any,
    *,
    out_dtype: Any = None,
) -> Any:
    """`dequantize_per_tensor` by tensors of one element."""
    return _dequantize(input, _one(scale), _one(zero_point), dtype, out_dtype)


@converts(quantized.dequantize_per_channel.default)
def dequantize_per_channel(
    input: Any,
    scales: Any,
    zero_points: Any,
    axis: Any,
    quant_min: Any,
    quant_max: Any,
    dtype: Any,
    *,
    out_dtype: Any = None,
) -> Any:
    """``(input - zero_points) * scales`` along an axis; the difference is one of integers."""
    _checked(dtype, quant_min, quant_max)
    axis = normalize_axis(axis, ndim(input))
    wanted = "float32" if out_dtype is None else dtypes.to_tvm(out_dtype)
    kinds = [_torch(input), _torch(scales)]
    count = product(shape(scales))
    channels = isinstance(count, int) and count == shape(input)[axis]
    if zero_points is None:
        zero_points = scalar(0, "int32")
        wide = _torch(input)
    else:
        kinds.append(_torch(zero_points))
        wide = _promoted(kinds[0], kinds[2])
    plain = _small(input) and wide in (torch.int32, torch.int64) and wanted == "float32"
    if plain and channels and _dtype(scales) == "float32":
        return op.dequantize(input, emit(scales), emit(cast(zero_points, "int32")), axis, "float32")
    lined = [count, *[1] * (ndim(input) - axis - 1)]
    points = zero_points if ndim(zero_points) == 0 else reshape(zero_points, lined)
    difference = _step(tirx.Sub, input, points, dtypes.to_tvm(wide))
    times = dtypes.to_tvm(_promoted(wide, kinds[1]))
    return cast(_step(tirx.Mul, difference, reshape(scales, lined), times), wanted)


def _quantize(
    input: Any, inverse: Any, zero_point: Any, quant_min: Any, quant_max: Any, kind: Any
) -> Any:
    _checked(kind, quant_min, quant_max)
    low, high, offset = (emit(cast(_one(v), "float32")) for v in (quant_min, quant_max, zero_point))

    def body(x: Any, inverse: Any, offset: Any, low: Any, high: Any) -> Any:
        return nan_min(nan_max(tirx.nearbyint(x * inverse) + offset, low), high)

    x = cast(input, "float32")
    clamped = elementwise("quantize", body, x, emit(inverse), offset, low, high)
    return cast(emit(clamped), dtypes.to_tvm(kind))


def _dequantize(input: Any, scale: Any, zero_point: Any, kind: Any, out_dtype: Any) -> Any:
    _checked(kind)
    wanted = "float32" if out_dtype is None else dtypes.to_tvm(out_dtype)
    if wanted == "float32" and _small(input) and _is_small(zero_point):
        factor, point = emit(cast(scale, "float32")), emit(cast(zero_point, "int32"))
        return op.dequantize(input, factor, point, -1, "float32")
    computed = compute_dtype(wanted)
    x = cast(cast(input, "float32") if wanted != computed else input, wanted)
    x = _step(tirx.Sub, x, cast(zero_point, computed), wanted)
    return _step(tirx.Mul, x, cast(scale, computed), wanted)


def _step(operator: Any, a: Any, b: Any, kind: str) -> Any:
    """One operation in the arithmetic of a dtype, rounded to it."""
    computed = compute_dtype(kind)
    a, b = emit(cast(a, computed)), emit(cast(b, computed))
    return emit(cast(emit(elementwise("dequantize", operator, a, b)), kind))


def _one(value: Any) -> Any:
    """A number, or a tensor of one element, as something 0-d."""
    if isinstance(value, (bool, int, float)):
        return value
    value = emit(value)
    return value if ndim(value) == 0 else emit(reshape(value, []))


def _is_small(zero_point: Any) -> bool:
    """Whether a zero point differs from every small integer by what float32 holds exactly."""
    if isinstance(zero_point, int):
        return abs(zero_point) <= 1 << 16
    if isinstance(zero_point, float):
        return False
    return "int" in _dtype(zero_point)


def _small(x: Any) -> bool:
    return _dtype(x) in SMALL


def _dtype(x: Any) -> str:
    return dtype(x)


def _torch(x: Any) -> torch.dtype:
    return dtypes.to_torch(_dtype(x))


def _promoted(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    try:
        return torch.promote_types(a, b)
    except RuntimeError as error:
        raise Refused(str(error)) from error


def _checked(kind: Any, quant_min: Any = None, quant_max: Any = None) -> None:
    """Leave to eager what it refuses, and the floats of eight bits."""
    name = dtypes.to_tvm(kind)
    if name not in _INTEGERS:
        raise Unsupported(f"quantised values of dtype {name}")
    limits = torch.iinfo(kind)
    low, high = (v if isinstance(v, int) else const_number(v) for v in (quant_min, quant_max))
    if (low is not None and low < limits.min) or (high is not None and high > limits.max):
        raise Refused("quant_min or quant_max out of bounds for dtype")
