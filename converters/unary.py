"""Functions of one element: maths, rounding, signs and tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .common import Promotion, cast, converts, dtype, is_float, op, tirx
from .elementwise import elementwise, extern, number, select

aten = torch.ops.aten
prims = torch.ops.prims

# Functions that Relax has; integers are taken as floats.
_MATHS: dict[str, Callable[..., Any]] = {
    "acos": op.acos,
    "acosh": op.acosh,
    "asin": op.asin,
    "asinh": op.asinh,
    "atan": op.atan,
    "cos": op.cos,
    "erf": op.erf,
    "exp": op.exp,
    "log": op.log,
    "rsqrt": op.rsqrt,
    "sin": op.sin,
    "sqrt": op.sqrt,
    "tan": op.tan,
    "tanh": op.tanh,
    "sigmoid": op.sigmoid,
}

# Functions that Relax lacks, of one TIR scalar.
_KERNELS: dict[str, Callable[..., Any]] = {
    "atanh": lambda x: extern("atanh", x),
    # TVM has no lowering of its own sinh and cosh inside vector loops.
    "cosh": lambda x: extern("cosh", x),
    "erfc": lambda x: extern("erfc", x),
    "exp2": tirx.exp2,
    "expm1": lambda x: extern("expm1", x),
    "lgamma": lambda x: extern("lgamma", x),
    "log10": tirx.log10,
    "log1p": tirx.log1p,
    "log2": tirx.log2,
    "sinh": lambda x: extern("sinh", x),
}


def _targets(name: str) -> list[Any]:
    found = [getattr(aten, name).default]
    return [*found, getattr(prims, name).default] if hasattr(prims, name) else found


def _register_maths(name: str, relax_op: Callable[..., Any]) -> None:
    def maths(self: Any) -> Any:
        return relax_op(self)

    converts(*_targets(name), promote=Promotion.INT_TO_FLOAT)(maths)


def _register_kernel(name: str, body: Callable[..., Any]) -> None:
    def kernel(self: Any) -> Any:
        return elementwise(name, body, self)

    converts(*_targets(name), promote=Promotion.INT_TO_FLOAT)(kernel)


for _name, _op in _MATHS.items():
    _register_maths(_name, _op)
for _name, _body in _KERNELS.items():
    _register_kernel(_name, _body)


# Rounding to whole numbers, which integers are.
_ROUNDING: dict[str, Callable[..., Any]] = {
    "ceil": op.ceil,
    "floor": op.floor,
    "trunc": op.trunc,
    "round": op.round,
}


def _register_rounding(name: str, relax_op: Callable[..., Any]) -> None:
    def rounding(self: Any) -> Any:
        return relax_op(self) if is_float(self) else self

    converts(*_targets(name), promote=Promotion.DEFAULT)(rounding)


for _name, _op in _ROUNDING.items():
    _register_rounding(_name, _op)


@converts(aten.round.decimals, promote=Promotion.DEFAULT, promote_args=("self",))
def round_decimals(self: Any, *, decimals: int) -> Any:
    """Half to even after scaling by a power of ten, whose error eager has too."""
    if not is_float(self):
        return self
    ten = 10.0 ** abs(decimals)
    if math.isinf(ten):
        return self

    def body(x: Any) -> Any:
        scale = number(ten, x)
        if decimals < 0:
            return tirx.nearbyint(x / scale) * scale
        return tirx.nearbyint(x * scale) / scale

    return elementwise("round_decimals", body, self)


@converts(aten.abs.default, prims.abs.default, promote=Promotion.DEFAULT)
def absolute(self: Any) -> Any:
    """The magnitude; the least integer stays as it is."""
    return self if _unsigned(self) else op.abs(self)


@converts(aten.neg.default, aten._neg_view.default, prims.neg.default, promote=Promotion.DEFAULT)
def negative(self: Any) -> Any:
    """The other sign; unsigned integers wrap."""
    if _unsigned(self):
        return elementwise("negative", lambda x: number(0, x) - x, self)
    return op.negative(self)


@converts(aten.sign.default, aten.sgn.default, prims.sign.default, promote=Promotion.DEFAULT)
def sign(self: Any) -> Any:
    """-1, 0 or 1; NaN gives 0."""
    if dtype(self) == "bool":
        return self

    def body(x: Any) -> Any:
        zero, one = number(0, x), number(1, x)
        above = select(x > zero, one, zero)
        return above if _unsigned(self) else select(x < zero, zero - one, above)

    return elementwise("sign", body, self)


def _unsigned(x: Any) -> bool:
    return dtype(x) == "bool" or dtype(x).startswith("uint")


def _single(x: Any) -> Any:
    """TVM's tests take no bfloat16."""
    return cast(x, "float32") if dtype(x) == "bfloat16" else x


@converts(aten.isnan.default)
def isnan(self: Any) -> Any:
    """Whether each element is NaN; an integer never is."""
    return op.isnan(_single(self)) if is_float(self) else op.zeros_like(self, "bool")


@converts(aten.isinf.default)
def isinf(self: Any) -> Any:
    """Whether each element is infinite; an integer never is."""
    return op.isinf(_single(self)) if is_float(self) else op.zeros_like(self, "bool")


@converts(aten.isfinite.default, prims.isfinite.default)
def isfinite(self: Any) -> Any:
    """Whether each element is neither infinite nor NaN; an integer always is."""
    return op.isfinite(_single(self)) if is_float(self) else op.ones_like(self, "bool")


@converts(aten.angle.default, promote=Promotion.INT_TO_FLOAT)
def angle(self: Any) -> Any:
    """0 for positive numbers and zeros, pi for negative ones, NaN for NaN."""

    def body(x: Any) -> Any:
        turned = select(x < number(0.0, x), number(math.pi, x), number(0.0, x))
        return select(tirx.isnan(x), x, turned)

    return elementwise("angle", body, self)


@converts(aten.conj_physical.default, prims.conj_physical.default)
def conj_physical(self: Any) -> Any:
    """The value itself, of a real number."""
    return self
