"""Casts between dtypes, and copies: a Relax value is never written, so a copy is the value."""

from __future__ import annotations

from typing import Any

import torch

from fx2relax import dtypes

from .common import (
    Unsupported,
    cast,
    converts,
    dtype,
    op,
    shape,
    shape_expr,
    te,
    te_call,
    tirx,
)

aten = torch.ops.aten
prims = torch.ops.prims


@converts(prims.convert_element_type.default)
def convert_element_type(a: Any, dtype: Any) -> Any:
    """Floats outside an integer's range, and NaN, wrap as x86's conversions do."""
    return cast(a, dtypes.to_tvm(dtype))


@converts(aten._to_copy.default)
def to_copy(
    self: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Any:
    """A cast; the layout in memory is given to the outputs after the call."""
    if layout not in (None, torch.strided):
        raise Unsupported(f"layout {layout}")
    return self if dtype is None else cast(self, dtypes.to_tvm(dtype))


@converts(aten.clone.default, prims.clone.default)
def clone(self: Any, *, memory_format: Any = None) -> Any:
    """The value itself."""
    return self


@converts(aten.lift_fresh_copy.default, aten.detach.default, aten.alias.default)
def same(self: Any) -> Any:
    """The value itself."""
    return self


@converts(aten.lift_fresh.default, aten.lift.default, aten.alias_copy.default)
def lifted(self: Any) -> Any:
    """The value itself."""
    return self


@converts(aten.detach_copy.default)
def detach_copy(self: Any) -> Any:
    """The value itself."""
    return self


@converts(prims.device_put.default)
def device_put(a: Any, device: Any, non_blocking: bool = False) -> Any:
    """The value itself: a graph runs on one device."""
    return a


@converts(aten.copy.default)
def copy(self: Any, src: Any, non_blocking: bool = False) -> Any:
    """`src` in the shape and dtype of `self`."""
    return op.broadcast_to(cast(src, dtype(self)), shape_expr(shape(self)))


@converts(aten.view.dtype)
def view_dtype(self: Any, dtype: Any) -> Any:
    """The same bits as another dtype of the same width."""
    target = dtypes.to_tvm(dtype)
    source = str(_dtype(self))
    if source == target:
        return self
    if "bool" in (source, target) or _bits(source) != _bits(target):
        raise Unsupported(f"{source} seen as {target}")

    def reinterpret(x: Any) -> Any:
        return te.compute(x.shape, lambda *at: tirx.reinterpret(target, x(*at)), name="reinterpret")

    return te_call(reinterpret, self)


def _dtype(x: Any) -> str:
    return dtype(x)


def _bits(name: str) -> int:
    return torch.empty((), dtype=dtypes.to_torch(name)).element_size() * 8
