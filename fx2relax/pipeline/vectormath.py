"""Polynomials in the place of calls of libm; extremes that keep NaN.

max and min take NaN from either side, as PyTorch's do: TVM's drop it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tvm
from tvm import tirx

from . import bounded
from . import polynomials as p
from . import polynomials_angles as angles
from . import polynomials_circle as circle
from . import polynomials_division as division
from . import polynomials_double as double
from . import polynomials_erf as errors
from .polynomials import F32, bind
from .tir import Rewriter, extern, extern_name

#: The sigmoid of a product.
GATE = "fx2relax.gate"
# By the name of TVM's operator, or of the function of libm: what computes it for float32, and how
# many units in the last place it is at most away from the exact value.
FUNCTIONS: dict[str, tuple[Callable[..., Any], float]] = {
    "tirx.exp": (p.exp, 2),
    "tirx.exp2": (p.exp2, 2),
    "expm1f": (p.expm1, 2),
    "tirx.log": (p.log, 1),
    "prim.log2": (p.log2, 1),
    "tirx.log10": (p.log10, 1),
    "tirx.log1p": (p.log1p, 2),
    "tirx.sigmoid": (p.sigmoid, 3),
    "tirx.tanh": (p.tanh, 2),
    "tirx.erf": (p.erf, 2),
    "erfcf": (errors.erfc, 4),
    "sinhf": (angles.sinh, 2),
    "coshf": (angles.cosh, 2),
    "tirx.asinh": (angles.asinh, 4),
    "tirx.acosh": (angles.acosh, 3),
    "atanhf": (angles.atanh, 2),
    "tirx.asin": (angles.asin, 3),
    "tirx.acos": (angles.acos, 2),
    "tirx.atan": (angles.atan, 3),
    "atan2f": (angles.atan2, 4),
    GATE: (p.gate, 3),
    bounded.PREFIX + "sin": (circle.sin, 2),
    bounded.PREFIX + "cos": (circle.cos, 2),
    bounded.PREFIX + "tan": (circle.tan, 3),
    bounded.PREFIX + "fmod": (division.fmod, 0),
}
#: The same for float64.
DOUBLES: dict[str, tuple[Callable[..., Any], float]] = {
    "tirx.exp": (double.exp, 2),
    "expm1": (double.expm1, 2),
    "tirx.log": (double.log, 1),
    "tirx.log1p": (double.log1p, 2),
    "tirx.sigmoid": (double.sigmoid, 3),
    "tanh": (double.tanh, 3),
    "tirx.erf": (errors.erf64, 2),
    "erfc": (errors.erfc64, 4),
    bounded.PREFIX + "fmod": (division.fmod, 0),
}
_FLOATS = ("float16", "float32", "float64")
_LARGEST = {
    3.4028234663852886e38,  # float32
    1.7976931348623157e308,
    65504.0,  # float16
    3.3895313892515355e38,  # bfloat16
}


def _extreme(node: Any, larger: bool) -> Any:
    return _take_nan(node.a, node.b, larger) if _is_extreme(node) else node


def _with_gate(node: Any) -> Any:
    """A product of float32 of which a factor is a sigmoid, that one as a gate."""

    def factor(side: Any) -> Any:
        return extern(GATE, side.args, side.ty) if _is_sigmoid(side) else side

    return tirx.Mul(factor(node.a), factor(node.b))


def _is_sigmoid(node: Any) -> bool:
    return (
        isinstance(node, tvm.ir.Call)
        and getattr(node.op, "name", "") == "tirx.sigmoid"
        and str(node.ty.dtype) == F32
    )


def _take_nan(left: Any, right: Any, larger: bool) -> Any:
    def choose(a: Any, b: Any) -> Any:
        wins = a > b if larger else a < b
        return tirx.Select(tirx.Or(wins, _is_nan(a)), a, b)

    return bind(left, lambda a: bind(right, lambda b: choose(a, b)))


def _is_nan(x: Any) -> Any:
    """A comparison that LLVM makes one of "unordered"; of a variable, or it is computed twice.

    TVM simplifies ``x != x`` to False, and does not vectorise its isnan.
    """
    if str(x.ty.dtype) == "float16":  # compared in float32: its bits are nearer
        sign = tirx.const(0x7FFF, "uint16")
        return (tirx.reinterpret("uint16", x) & sign) > tirx.const(0x7C00, "uint16")
    return tirx.Not(tirx.GE(x, x))


def _is_function(node: Any) -> bool:
    name = extern_name(node) or getattr(node.op, "name", "")
    return name in FUNCTIONS or name in DOUBLES or name in ("tirx.isnan", "tirx.copysign")


def _is_extreme(node: Any) -> bool:
    return str(node.ty.dtype) in _FLOATS


def _is_largest(node: Any) -> bool:
    return abs(float(node.value)) in _LARGEST


#: What there is in a kernel that `VectorMath` changes.
MATH = {
    tvm.ir.Call: _is_function,
    tirx.Max: _is_extreme,
    tirx.Min: _is_extreme,
    tirx.FloatImm: _is_largest,
}


class VectorMath(Rewriter):
    """Puts the functions of this module in the place of calls to libm."""

    def visit_BufferStore(self, node: Any) -> Any:
        """Any store; the neutral element of a max or min is infinite, where TVM's is finite."""
        new = Rewriter.store(self, node)
        value = new.value
        wide = value.value if isinstance(value, tirx.Cast) else value
        if not isinstance(wide, tirx.FloatImm) or not _is_largest(wide):
            return new
        infinite = tirx.const(math.copysign(math.inf, float(wide.value)), str(wide.ty.dtype))
        if isinstance(value, tirx.Cast):
            infinite = tirx.Cast(value.ty.dtype, infinite)
        return tirx.BufferStore(new.buffer, infinite, list(new.indices))

    def expr(self, node: Any) -> Any:
        """Any expression."""
        if type(node) is tirx.Mul and (_is_sigmoid(node.a) or _is_sigmoid(node.b)):
            node = _with_gate(node)
        return super().expr(node)

    def leave(self, node: Any) -> Any:
        """A polynomial for a call that has one; max and min that keep NaN."""
        kind = type(node)
        if kind is tvm.ir.Call:
            return self._call(node)
        if kind in (tirx.Max, tirx.Min):
            return _extreme(node, kind is tirx.Max)
        return node

    @staticmethod
    def _call(node: Any) -> Any:
        name = extern_name(node) or getattr(node.op, "name", "")
        if name == "tirx.isnan" and str(node.args[0].ty.dtype) in _FLOATS:
            return bind(node.args[0], _is_nan, "x")
        dtype = str(getattr(node.ty, "dtype", ""))  # a pointer has none
        if name == "tirx.copysign" and dtype in p.WORDS:  # TVM's does not become a vector
            return p.copysign(*node.args)
        functions = DOUBLES if dtype == "float64" else FUNCTIONS
        if name not in functions:
            return node
        function, _ = functions[name]
        args = node.args if extern_name(node) is None else node.args[1:]
        if dtype in (F32, "float64"):
            return function(*args)
        if dtype == "float16":
            return tirx.Cast(dtype, function(*(tirx.Cast(F32, a) for a in args)))
        return node
