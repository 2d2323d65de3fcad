"""Tensors from sizes and numbers. What eager leaves uninitialised is zero here."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from fx2relax import dtypes
from fx2relax.compat import const_number, is_prim_expr

from .common import Expr, Refused, Unsupported, cast, converts, op, shape, shape_expr
from .common import dtype as dtype_of

aten = torch.ops.aten
prims = torch.ops.prims


def filled(sizes: Sequence[Any], value: Any, dtype: str) -> Any:
    """A tensor of one number."""
    if isinstance(value, (int, float)) and not _fits(value, dtypes.to_torch(dtype)):
        raise Refused(f"{value}, which {dtype} does not hold")
    element = cast(value, dtype)
    known = const_number(element)
    if known is not None and not math.isfinite(known):
        # TVM 0.27 cannot legalise a full of inf or NaN.
        return op.broadcast_to(element, shape_expr(sizes))
    return op.full(shape_expr(sizes), element, dtype)


@functools.cache
def _fits(value: float, dtype: torch.dtype) -> bool:
    try:
        torch.full((2,), value, dtype=dtype)  # a single element is not checked
    except RuntimeError:
        return False
    return True


def natural(value: Any) -> str:
    """The dtype that PyTorch gives a tensor of a number."""
    if isinstance(value, Expr) and not is_prim_expr(value):
        return dtype_of(value)
    if isinstance(value, bool):
        return "bool"
    integral = isinstance(value, int) or (is_prim_expr(value) and "int" in str(value.ty.dtype))
    return "int64" if integral else dtypes.to_tvm(torch.get_default_dtype())


def _chosen(dtype: Any, otherwise: str) -> str:
    return otherwise if dtype is None else dtypes.to_tvm(dtype)


def _default() -> str:
    return dtypes.to_tvm(torch.get_default_dtype())


def _strided(layout: Any) -> None:
    if layout not in (None, torch.strided):
        raise Unsupported(f"layout {layout}")


@converts(aten.scalar_tensor.default)
def scalar_tensor(
    s: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Any:
    """A number as a 0-d tensor; of the default dtype when none is named."""
    _strided(layout)
    return cast(s, _chosen(dtype, _default()))


@converts(prims.scalar_tensor.default)
def prims_scalar_tensor(s: Any, *, dtype: Any = None, device: Any = None) -> Any:
    """A number as a 0-d tensor."""
    return cast(s, _chosen(dtype, natural(s)))


@converts(aten.full.default)
def full(
    size: Any,
    fill_value: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Any:
    """A tensor of one number, of the number's own dtype when none is named."""
    _strided(layout)
    return filled(size, fill_value, _chosen(dtype, natural(fill_value)))


@converts(aten.full_like.default)
def full_like(
    self: Any,
    fill_value: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Any:
    """A tensor of one number, of the tensor's dtype when none is named."""
    _strided(layout)
    return filled(shape(self), fill_value, _chosen(dtype, dtype_of(self)))


@converts(aten.new_full.default)
def new_full(
    self: Any,
    size: Any,
    fill_value: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Any:
    """A tensor of one number in another shape."""
    _strided(layout)
    return filled(size, fill_value, _chosen(dtype, dtype_of(self)))


@converts(prims.full.default)
def prims_full(shape: Any, fill_value: Any, *, dtype: Any, device: Any, requires_grad: bool) -> Any:
    """A tensor of one number."""
    return filled(shape, fill_value, dtypes.to_tvm(dtype))


@converts(prims.full_like.default)
def prims_full_like(
    a: Any, fill_value: Any, *, dtype: Any, device: Any, requires_grad: bool
) -> Any:
    """A tensor of one number in a tensor's shape."""
    return filled(shape(a), fill_value, dtypes.to_tvm(dtype))


@converts(aten.fill.Scalar, aten.fill.Tensor, prims.fill.default)
def fill(self: Any, value: Any) -> Any:
    """A tensor of one number in a tensor's shape and dtype."""
    return filled(shape(self), value, dtype_of(self))


@converts(aten.zero.default)
def zero(self: Any) -> Any:
    """Zeros in a tensor's shape and dtype."""
    return filled(shape(self), 0, dtype_of(self))


def _register_sized(target: Any, value: int) -> None:
    def sized(
        size: Any,
        *,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
    ) -> Any:
        _strided(layout)
        return filled(size, value, _chosen(dtype, _default()))

    converts(target)(sized)


def _register_like(target: Any, value: int) -> None:
    def like(
        self: Any,
        *,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
        memory_format: Any = None,
    ) -> Any:
        return full_like(self, value, dtype=dtype, layout=layout)

    converts(target)(like)


def _register_new(target: Any, value: int) -> None:
    def new(
        self: Any,
        size: Any,
        *,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
    ) -> Any:
        return new_full(self, size, value, dtype=dtype, layout=layout)

    converts(target)(new)


for _target, _value in (
    (aten.zeros.default, 0),
    (aten.ones.default, 1),
    (aten._efficientzerotensor.default, 0),
):
    _register_sized(_target, _value)
for _target, _value in (
    (aten.zeros_like.default, 0),
    (aten.ones_like.default, 1),
    (aten.empty_like.default, 0),
):
    _register_like(_target, _value)
for _target, _value in (
    (aten.new_zeros.default, 0),
    (aten.new_ones.default, 1),
    (aten.new_empty.default, 0),
):
    _register_new(_target, _value)


@converts(aten.empty.memory_format)
def empty(
    size: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Any:
    """Zeros."""
    _strided(layout)
    return filled(size, 0, _chosen(dtype, _default()))


@converts(aten.empty_strided.default, aten.empty_permuted.default)
def empty_strided(
    size: Any,
    stride: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Any:
    """Zeros; the layout in memory is given to the outputs after the call."""
    return empty(size, dtype=dtype, layout=layout)


@converts(aten.new_empty_strided.default)
def new_empty_strided(
    self: Any,
    size: Any,
    stride: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Any:
    """Zeros."""
    return new_full(self, size, 0, dtype=dtype, layout=layout)


@converts(prims.empty_strided.default)
def prims_empty_strided(
    shape: Any, strides: Any, *, dtype: Any, device: Any, requires_grad: bool
) -> Any:
    """Zeros."""
    return filled(shape, 0, dtypes.to_tvm(dtype))


@converts(prims.empty_permuted.default)
def prims_empty_permuted(
    shape: Any, physical_layout: Any, *, dtype: Any, device: Any, requires_grad: bool
) -> Any:
    """Zeros."""
    return filled(shape, 0, dtypes.to_tvm(dtype))
