"""Division that rounds, and remainders: floor and truncation, of integers and of floats."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fx2relax.compat import const_number

from .common import (
    Promotion,
    Unsupported,
    cast,
    converts,
    dtype,
    is_float,
    ndim,
    op,
    product,
    shape,
    tirx,
)
from .elementwise import elementwise, extern, let, number, select
from .opaque import local, loops, opaque, require, wide

aten = torch.ops.aten
prims = torch.ops.prims

_HALF = ("float16", "bfloat16")


def int_quotient(a: Any, b: Any, rule: Callable[[Any, Any], Any]) -> Any:
    """An integer quotient by a rule of TIR's; by zero RuntimeError, as in eager."""
    return elementwise("int_divide", lambda x, y: _guarded(x, y, rule), a, _nonzero(b))


def int_remainder(a: Any, b: Any, rule: Callable[[Any, Any], Any]) -> Any:
    """An integer remainder by a rule of TIR's; by zero RuntimeError, as in eager."""

    def remainder(x: Any, y: Any) -> Any:
        # The least integer modulo -1 is a trap of the processor's; every remainder by 1 is 0.
        return rule(x, _not_minus_one(y))

    return elementwise("int_remainder", remainder, a, _nonzero(b))


def _guarded(x: Any, y: Any, rule: Callable[[Any, Any], Any]) -> Any:
    quotient = rule(x, _not_minus_one(y))
    if quotient.ty.dtype.startswith("uint") or (isinstance(y, tirx.IntImm) and y.value != -1):
        return quotient
    return select(tirx.EQ(y, number(-1, y)), number(0, x) - x, quotient)


def _not_minus_one(y: Any) -> Any:
    if str(y.ty.dtype).startswith("uint") or (isinstance(y, tirx.IntImm) and y.value != -1):
        return y
    return select(tirx.EQ(y, number(-1, y)), number(1, y), y)


def _nonzero(divisor: Any) -> Any:
    """An integer divisor, after every element of it has been seen not to be zero."""
    known = const_number(divisor)
    if known == 0:
        raise Unsupported("division by the number 0")
    if known is not None:
        return divisor
    count = product(shape(divisor))

    def look(ins: Any, outs: Any, sizes: Any) -> None:
        # A loop of nothing but checks is one that TVM unrolls, however long.
        zeros = local("int64")
        zeros[0] = wide(0)
        with loops([sizes[0]]) as (i,):
            zeros[0] += tirx.Cast("int64", tirx.EQ(ins[0][i], number(0, ins[0][i])))
        require(zeros[0].equal(wide(0)), "ZeroDivisionError")
        outs[0][wide(0)] = number(0, ins[0][wide(0)])

    name = divisor.ty.dtype
    zero = opaque("nonzero_divisor", look, [divisor], lambda _: [(1, str(name))], [count])
    return op.add(divisor, op.reshape(zero, ()))


def floor_quotient(a: Any, b: Any, kind: str = "float32") -> Any:
    """A float quotient rounded down as Python does: from the remainder, never off by one.

    `kind` may be the half precision that every step is rounded to.
    """

    def rounded(value: Any) -> Any:
        if kind not in _HALF:
            return value
        return tirx.Cast("float32", tirx.Cast(kind, value))

    return elementwise("floor_divide", lambda x, y: _floor_quotient(x, y, rounded), a, b)


def _floor_quotient(a: Any, b: Any, rounded: Callable[[Any], Any]) -> Any:
    zero, one = number(0.0, a), number(1.0, a)
    quotient = rounded(_quotient(a, b))

    def with_rest(rest: Any) -> Any:
        exact = rounded(_quotient(rounded(a - rest), b))
        apart = _apart(b, rest)
        return let(select(apart, rounded(exact - one), exact), floor)

    def floor(value: Any) -> Any:
        down = tirx.floor(value)
        near = select(value - down > number(0.5, a), down + one, down)
        return select(tirx.EQ(value, zero), tirx.copysign(zero, quotient), near)

    floored = let(extern("fmod", a, b), with_rest)
    return select(tirx.EQ(b, zero), quotient, floored)


def _quotient(a: Any, b: Any) -> Any:
    """``a / b``; TVM refuses to divide by a literal zero, and takes 0 / b for 0."""
    if _is_zero(b):  # a * inf is a / 0
        return a * number(math.copysign(math.inf, b.value), a)
    if _is_zero(a):  # NaN where b is 0 or NaN
        return tirx.copysign(extern("fmod", a, b), b if math.copysign(1, a.value) > 0 else -b)
    return a / b


def _is_zero(value: Any) -> bool:
    return isinstance(value, tirx.FloatImm) and value.value == 0


def _apart(b: Any, rest: Any) -> Any:
    """Whether a rest that is not zero has another sign than the divisor."""
    zero = number(0.0, b)
    return select(b < zero, rest > zero, rest < zero)


def _remainder(a: Any, b: Any) -> Any:
    if _is_zero(b):
        return extern("fmod", a, b)

    def with_rest(rest: Any) -> Any:
        apart = _apart(b, rest)
        return select(apart, rest + b, rest)

    return let(extern("fmod", a, b), with_rest)


def _divide(a: Any, b: Any, mode: str) -> Any:
    """Half precision is rounded at every step between tensors, at the end only by a number."""
    kind = next((dtype(v) for v in (a, b) if dtype(v) in _HALF), dtype(a))
    if not is_float(a):
        return int_quotient(a, b, tirx.floordiv if mode == "floor" else tirx.truncdiv)
    stepwise = kind in _HALF and ndim(b) > 0
    if kind in _HALF:
        a, b = cast(cast(a, kind), "float32"), cast(b, "float32")
    if mode == "floor":
        return floor_quotient(a, b, kind if stepwise else "float32")
    if stepwise:
        return op.trunc(cast(cast(op.divide(a, b), kind), "float32"))
    return elementwise("trunc_divide", lambda x, y: tirx.trunc(_quotient(x, y)), a, b)


@converts(
    aten.floor_divide.default,
    aten.floor_divide.Scalar,
    promote=Promotion.NO_OPMATH,
    exact_scalars=True,
)
def floor_divide(self: Any, other: Any) -> Any:
    """A quotient rounded down; of integers by zero RuntimeError."""
    return _divide(self, other, "floor")


@converts(
    aten.div.Tensor_mode,
    aten.div.Scalar_mode,
    promote=Promotion.NO_OPMATH,
    promote_args=("self", "other"),
    exact_scalars=True,
)
def div_mode(self: Any, other: Any, *, rounding_mode: str | None) -> Any:
    """A quotient rounded down or towards zero; of integers by zero RuntimeError."""
    if rounding_mode is None:
        raise Unsupported("true division, which is another operator")
    return _divide(self, other, rounding_mode)


@converts(
    aten.remainder.Tensor,
    aten.remainder.Scalar,
    aten.remainder.Scalar_Tensor,
    prims.remainder.default,
    promote=Promotion.DEFAULT,
)
def remainder(self: Any, other: Any) -> Any:
    """Python's ``%``: the sign is the divisor's; of integers by zero RuntimeError."""
    if is_float(self):
        return elementwise("remainder", _remainder, self, other)
    return int_remainder(self, other, tirx.floormod)


@converts(aten.fmod.Tensor, aten.fmod.Scalar, prims.fmod.default, promote=Promotion.DEFAULT)
def fmod(self: Any, other: Any) -> Any:
    """C's ``%``: the sign is the dividend's; of integers by zero RuntimeError."""
    if is_float(self):
        return elementwise("fmod", lambda a, b: extern("fmod", a, b), self, other)
    return int_remainder(self, other, tirx.truncmod)
