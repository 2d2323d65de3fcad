"""Comparisons, logic, bits, extremes of two, and choices between elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fx2relax.agreement import agreed

from .common import Promotion, cast, converts, dtype, is_float, op, tirx
from .elementwise import (
    elementwise,
    is_floating,
    is_nan,
    logical_not,
    nan_max,
    nan_min,
    not_equal,
    number,
    same_tensor,
    select,
)

aten = torch.ops.aten
prims = torch.ops.prims


def equal(a: Any, b: Any) -> Any:
    """Whether two promoted tensors are equal; NaN equals nothing."""
    if is_float(a) and same_tensor(a, b):
        return logical_not(is_nan(a))
    return logical_not(op.logical_xor(a, b)) if dtype(a) == "bool" else op.equal(a, b)


# Comparisons, made in the operands' common dtype.
_COMPARE: dict[Any, Callable[..., Any]] = {
    "eq": equal,
    "ne": not_equal,
    "lt": op.less,
    "le": op.less_equal,
    "gt": op.greater,
    "ge": op.greater_equal,
}


def _register_compare(name: str, relax_op: Callable[..., Any]) -> None:
    def compare(self: Any, other: Any) -> Any:
        if dtype(self) == "bool" and name not in ("eq", "ne"):
            return relax_op(cast(self, "uint8"), cast(other, "uint8"))
        if name in ("le", "ge") and is_float(self) and same_tensor(self, other):
            return equal(self, other)
        return relax_op(self, other)

    packet = getattr(aten, name)
    targets = (packet.Tensor, packet.Scalar, getattr(prims, name).default)
    converts(*targets, promote=Promotion.ALWAYS_BOOL)(compare)


for _name, _op in _COMPARE.items():
    _register_compare(_name, _op)


_LOGICAL: dict[Any, Callable[..., Any]] = {
    aten.logical_and.default: op.logical_and,
    aten.logical_or.default: op.logical_or,
    aten.logical_xor.default: op.logical_xor,
}


def _register_logical(target: Any, relax_op: Callable[..., Any]) -> None:
    def logical(self: Any, other: Any) -> Any:
        return relax_op(truth(self), truth(other))

    converts(target)(logical)


def truth(x: Any) -> Any:
    """Whether each element is not zero; NaN is not."""
    return cast(x, "bool")


for _name, _op in _LOGICAL.items():
    _register_logical(_name, _op)


@converts(aten.logical_not.default)
def logical_not_(self: Any) -> Any:
    """Whether each element is zero."""
    return logical_not(truth(self))


# Bitwise operators; on booleans the logical ones.
_BITWISE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "bitwise_and": (op.bitwise_and, op.logical_and),
    "bitwise_or": (op.bitwise_or, op.logical_or),
    "bitwise_xor": (op.bitwise_xor, op.logical_xor),
}


def _register_bitwise(name: str, on_ints: Any, on_bools: Any) -> None:
    def bitwise(self: Any, other: Any) -> Any:
        return (on_bools if dtype(self) == "bool" else on_ints)(self, other)

    packet = getattr(aten, name)
    targets = (packet.Tensor, packet.Scalar, packet.Scalar_Tensor, getattr(prims, name).default)
    converts(*targets, promote=Promotion.DEFAULT)(bitwise)


for _name, (_ints, _bools) in _BITWISE.items():
    _register_bitwise(_name, _ints, _bools)


@converts(aten.bitwise_not.default, prims.bitwise_not.default)
def bitwise_not(self: Any) -> Any:
    """All bits turned; on booleans the logical not."""
    return logical_not(self) if dtype(self) == "bool" else op.bitwise_not(self)


@converts(
    aten.bitwise_left_shift.Tensor,
    aten.bitwise_left_shift.Tensor_Scalar,
    aten.bitwise_left_shift.Scalar_Tensor,
    aten.__lshift__.Tensor,
    aten.__lshift__.Scalar,
    prims.shift_left.default,
    promote=Promotion.BOOL_TO_LONG,
)
def left_shift(self: Any, other: Any) -> Any:
    """A shift by less than 0, or by the width or more, gives 0."""
    return elementwise("left_shift", _left_shift, self, other)


@converts(
    aten.bitwise_right_shift.Tensor,
    aten.bitwise_right_shift.Tensor_Scalar,
    aten.bitwise_right_shift.Scalar_Tensor,
    aten.__rshift__.Tensor,
    aten.__rshift__.Scalar,
    prims.shift_right_arithmetic.default,
    promote=Promotion.BOOL_TO_LONG,
)
def right_shift(self: Any, other: Any) -> Any:
    """A shift by less than 0, or by the width or more, leaves only the sign."""
    return elementwise("right_shift", _right_shift, self, other)


def _width(x: Any) -> tuple[int, bool]:
    name = str(x.ty.dtype)
    return int(name.removeprefix("u").removeprefix("int")), not name.startswith("uint")


def _outside(by: Any, bits: int) -> Any:
    over = by >= number(bits, by)
    return tirx.Or(by < number(0, by), over) if _width(by)[1] else over


def _left_shift(x: Any, by: Any) -> Any:
    bits, _ = _width(x)
    outside, zero = _outside(by, bits), number(0, x)
    return select(outside, zero, x << select(outside, zero, by))


def _right_shift(x: Any, by: Any) -> Any:
    bits, signed = _width(x)
    outside, last = _outside(by, bits), number(bits - 1, x)
    if signed:
        return x >> select(outside, last, by)
    return select(outside, number(0, x), x >> select(outside, last, by))


@converts(aten.maximum.default, prims.maximum.default, promote=Promotion.DEFAULT)
def maximum(self: Any, other: Any) -> Any:
    """The larger of two; NaN if either is."""
    return elementwise("maximum", nan_max, self, other)


@converts(aten.minimum.default, prims.minimum.default, promote=Promotion.DEFAULT)
def minimum(self: Any, other: Any) -> Any:
    """The smaller of two; NaN if either is."""
    return elementwise("minimum", nan_min, self, other)


@converts(aten.fmax.default, prims.fmax.default, promote=Promotion.DEFAULT)
def fmax(self: Any, other: Any) -> Any:
    """The larger of two; NaN only if both are."""
    return elementwise("fmax", lambda a, b: _ignoring(a, b, nan_max, a >= b), self, other)


@converts(aten.fmin.default, prims.fmin.default, promote=Promotion.DEFAULT)
def fmin(self: Any, other: Any) -> Any:
    """The smaller of two; NaN only if both are."""
    return elementwise("fmin", lambda a, b: _ignoring(a, b, nan_min, a <= b), self, other)


def _ignoring(a: Any, b: Any, rule: Any, first: Any) -> Any:
    """The first of equals: of two zeros its sign."""
    if not is_floating(a):
        return rule(a, b)
    return select(tirx.Or(first, tirx.isnan(b)), a, b)


_BOUNDS = ("self", "min", "max")


@converts(
    aten.clamp.default,
    promote=Promotion.DEFAULT,
    promote_args=_BOUNDS,
)
def clamp(self: Any, min: Any = None, max: Any = None) -> Any:
    """The bounds, the upper one last; NaN in any of the three gives NaN."""
    given = [x for x in (min, max) if x is not None]

    def body(x: Any, *bounds: Any) -> Any:
        limits = list(bounds)
        if min is not None:
            x = nan_max(x, limits.pop(0))
        return nan_min(x, limits.pop(0)) if limits else x

    return elementwise("clamp", body, self, *given)


@converts(aten.clamp.Tensor, promote=Promotion.DEFAULT, promote_args=_BOUNDS)
def clamp_tensor(self: Any, min: Any = None, max: Any = None) -> Any:
    """`clamp` by tensors."""
    return clamp(self, min, max)


@converts(
    aten.clamp_min.default,
    aten.clamp_min.Tensor,
    promote=Promotion.DEFAULT,
)
def clamp_min(self: Any, min: Any) -> Any:
    """`clamp` from below."""
    return clamp(self, min)


@converts(
    aten.clamp_max.default,
    aten.clamp_max.Tensor,
    promote=Promotion.DEFAULT,
)
def clamp_max(self: Any, max: Any) -> Any:
    """`clamp` from above."""
    return clamp(self, None, max)


@converts(
    aten.where.self,
    aten.where.ScalarSelf,
    aten.where.ScalarOther,
    aten.where.Scalar,
    promote=Promotion.NO_OPMATH,
    promote_args=("self", "other"),
)
def where(condition: Any, self: Any, other: Any) -> Any:
    """One or the other; the condition may be a uint8."""
    return op.where(*agreed([truth(condition), self, other]))


@converts(prims.where.default)
def prims_where(pred: Any, a: Any, b: Any) -> Any:
    """One or the other, of one dtype."""
    return op.where(*agreed([pred, a, b]))


@converts(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(self: Any, mask: Any, value: Any) -> Any:
    """A number in place of the chosen elements, in the tensor's dtype."""
    return op.where(truth(mask), cast(value, dtype(self)), self)


@converts(aten.signbit.default, prims.signbit.default)
def signbit(self: Any) -> Any:
    """Whether the sign bit is set, as in -0.0 and some NaN."""
    if is_float(self):
        one = cast(self, "float64" if dtype(self) == "float64" else "float32")
        return elementwise("signbit", _signbit, one)
    name = dtype(self)
    if name == "bool" or name.startswith("uint"):
        return op.zeros_like(self, "bool")
    return elementwise("signbit", lambda x: x < number(0, x), self)


def _signbit(x: Any) -> Any:
    integer = "int64" if str(x.ty.dtype) == "float64" else "int32"
    return tirx.reinterpret(integer, x) < tirx.const(0, integer)
