"""Complex tensors: made of real ones and of numbers, and taken apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fx2relax import dtypes
from fx2relax.complexes import Complex, as_complex, part_dtype

from .common import (
    Expr,
    Unsupported,
    cast,
    converts,
    dtype,
    emit,
    op,
    shape,
    shape_expr,
)
from .complex_parts import on_parts, part_keywords, real_converter
from .indices import broadcast_sizes

aten = torch.ops.aten
prims = torch.ops.prims


@converts(aten.view_as_real.default, aten.view_as_real_copy.default, complex_numbers=True)
def view_as_real(self: Complex) -> Any:
    """The parts along a new last axis."""
    return self.pairs


@converts(aten.view_as_complex.default, aten.view_as_complex_copy.default, complex_numbers=True)
def view_as_complex(self: Any) -> Complex:
    """Of a last axis of size 2."""
    return Complex(pairs=emit(self))


@converts(aten.complex.default, complex_numbers=True)
def complex_(real: Any, imag: Any) -> Complex:
    """Of its parts."""
    sizes = shape_expr(broadcast_sizes([shape(real), shape(imag)]))
    return Complex(op.broadcast_to(real, sizes), op.broadcast_to(imag, sizes))


@converts(aten.polar.default, complex_numbers=True)
def polar(abs: Any, angle: Any) -> Complex:
    """Of its length and its angle."""
    return Complex(op.multiply(abs, op.cos(angle)), op.multiply(abs, op.sin(angle)))


@converts(aten._to_copy.default, complex_numbers=True)
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
    """To or from a complex dtype; a complex number loses its imaginary part."""
    if layout not in (None, torch.strided):
        raise Unsupported(f"layout {layout}")
    return self if dtype is None else convert_element_type(self, dtype)


@converts(prims.convert_element_type.default, complex_numbers=True)
def convert_element_type(a: Any, dtype: Any) -> Any:
    """To or from a complex dtype; a complex number loses its imaginary part."""
    if dtype.is_complex:
        return _whole(a, part_dtype(dtype))
    return cast(a.real, dtypes.to_tvm(dtype))


def _whole(value: Any, kind: str) -> Complex:
    """As a complex tensor, both parts of the value's shape."""
    if isinstance(value, Complex):
        return value.map(lambda part: cast(part, kind))
    real = emit(cast(value, kind))
    return Complex(real, op.zeros_like(real))


@converts(aten.copy.default, complex_numbers=True)
def copy(self: Any, src: Any, non_blocking: bool = False) -> Any:
    """`src` in the shape and dtype of `self`."""
    if not isinstance(self, Complex):
        return op.broadcast_to(cast(src.real, dtype(self)), shape_expr(shape(self)))
    sizes = shape_expr(self.shape)
    return _whole(src, self.dtype).map(lambda part: op.broadcast_to(part, sizes))


def _joining(target: Any) -> Callable[..., Complex]:
    """Joins tensors of which some may be real."""

    def convert(tensors: Sequence[Any], dim: int = 0) -> Complex:
        kinds = {t.dtype if isinstance(t, Complex) else dtype(t) for t in tensors}
        kind = "float64" if "float64" in kinds else "float32"
        if kinds & {"float16", "bfloat16"}:
            raise Unsupported("half precision and complex tensors together")
        joined: Complex = on_parts(
            real_converter(target), [[_whole(t, kind) for t in tensors], dim], {}
        )
        return joined

    return convert


for _target in (aten.cat.default, aten.stack.default):
    converts(_target, complex_numbers=True)(_joining(_target))


def _filled(target: Any, place: str) -> Callable[..., Any]:
    """Runs a real converter with the parts of the number, or 0-d tensor, that it fills in."""
    at = [a.name for a in target._schema.arguments].index(place)

    def convert(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        if at < len(given):
            given[at] = _number(given[at])
        elif place in kwargs:
            kwargs[place] = _number(kwargs[place])
        return on_parts(real_converter(target), given, part_keywords(kwargs))

    return convert


def _number(value: Any) -> Complex:
    if isinstance(value, Expr):
        whole: Complex = as_complex(value, dtype(value))
        return whole
    return value if isinstance(value, Complex) else Complex(value.real, value.imag)


for _target, _place in (
    (aten.full.default, "fill_value"),
    (aten.full_like.default, "fill_value"),
    (aten.new_full.default, "fill_value"),
    (aten.scalar_tensor.default, "s"),
    (aten.fill.Scalar, "value"),
    (aten.fill.Tensor, "value"),
    (aten.masked_fill.Scalar, "value"),
    (aten.masked_fill.Tensor, "value"),
    (aten.constant_pad_nd.default, "value"),
    (aten.index_fill.int_Scalar, "value"),
    (aten.index_fill.int_Tensor, "value"),
):
    converts(_target, complex_numbers=True)(_filled(_target, _place))


@converts(aten.eye.default, aten.eye.m, complex_numbers=True)
def eye(*sizes: Any, dtype: Any, **options: Any) -> Complex:
    """Ones on the diagonal."""
    real = real_converter(aten.eye.default if len(sizes) == 1 else aten.eye.m)
    return _whole(real(*sizes, dtype=dtype.to_real(), **options), part_dtype(dtype))


def _ones(full: Any) -> Callable[..., Any]:
    def convert(*args: Any, **kwargs: Any) -> Any:
        return _filled(full, "fill_value")(*args, 1.0, **kwargs)

    return convert


for _target, _full in (
    (aten.ones.default, aten.full.default),
    (aten.ones_like.default, aten.full_like.default),
    (aten.new_ones.default, aten.new_full.default),
):
    converts(_target, complex_numbers=True)(_ones(_full))
