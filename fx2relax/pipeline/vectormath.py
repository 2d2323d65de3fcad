"""Elementary functions as polynomials, so that a loop over them runs in vector registers.

LLVM calls libm once per element for exp, erf, tanh and log, even inside a vector loop. Float32 gets
polynomials within a few units in the last place, float16 and bfloat16 the same through float32;
float64 stays with libm. max and min take NaN from either side, as PyTorch's do: TVM's drop it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import tirx

from .tir import Rewriter

F32 = "float32"
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# Adding this rounds a float32 below 2**22 to a whole number and leaves it in the low bits.
_ROUND = 12582912.0
_ROUND_BITS = 0x4B400000


def f32(value: float) -> Any:
    """A float32 constant."""
    return tirx.const(value, F32)


def i32(value: int) -> Any:
    """An int32 constant."""
    return tirx.const(value, "int32")


def bind(value: Any, body: Callable[[Any], Any], name: str = "t") -> Any:
    """`body(value)` with the value computed once."""
    var = tirx.Var(name, value.ty.dtype)
    return tirx.Let(var, value, body(var))


def horner(x: Any, coefficients: Sequence[float]) -> Any:
    """A polynomial, highest power first."""
    result = f32(coefficients[0])
    for c in coefficients[1:]:
        result = result * x + f32(c)
    return result


def _pow2(n: Any) -> Any:
    """2**n of an int32 within [-126, 127], by its exponent bits."""
    return tirx.reinterpret(F32, (n + i32(127)) << i32(23))


def exp(x: Any) -> Any:
    """e**x; NaN stays, overflow is inf, underflow passes through the denormals."""

    def reduced(v: Any) -> Any:
        return bind(v * f32(math.log2(math.e)) + f32(_ROUND), lambda t: scaled(v, t))

    def scaled(v: Any, t: Any) -> Any:
        return bind(
            t - f32(_ROUND),
            lambda n: bind(
                (v - n * f32(_LN2_HIGH)) - n * f32(_LN2_LOW),
                lambda r: bind(
                    tirx.reinterpret("int32", t) - i32(_ROUND_BITS),
                    lambda m: bind(m >> i32(1), lambda h: finish(r, m, h)),
                ),
            ),
        )

    def finish(r: Any, m: Any, h: Any) -> Any:
        p = horner(r, _EXP)
        # Two steps: 2**m alone leaves the range of float32 at both ends.
        return ((p * r * r + r) + f32(1.0)) * _pow2(h) * _pow2(m - h)

    # Comparisons with NaN are false, so NaN passes both.
    return bind(
        x,
        lambda a: bind(
            tirx.Select(a > f32(89.0), f32(89.0), a),
            lambda b: bind(tirx.Select(b < f32(-104.0), f32(-104.0), b), reduced),
        ),
        "x",
    )


_EXP = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)


def sigmoid(x: Any) -> Any:
    """1 / (1 + e**-x), exact in both tails."""
    return bind(
        x,
        lambda v: bind(
            exp(tirx.Select(v > f32(0.0), f32(0.0) - v, v)),
            lambda e: tirx.Select(v > f32(0.0), f32(1.0), e) / (f32(1.0) + e),
        ),
    )


_TANH = (
    -5.70498872745e-3,
    2.06390887954e-2,
    -5.37397155531e-2,
    1.33314422036e-1,
    -3.33332819422e-1,
)


def tanh(x: Any) -> Any:
    """A polynomial near zero, 1 - 2 / (e**(2 |x|) + 1) beyond."""

    def both(v: Any, a: Any) -> Any:
        small = bind(v * v, lambda s: v * (f32(1.0) + horner(s, _TANH) * s))
        large = bind(
            f32(1.0) - f32(2.0) / (exp(a + a) + f32(1.0)),
            lambda y: tirx.Select(v < f32(0.0), f32(0.0) - y, y),
        )
        return tirx.Select(a > f32(0.625), large, small)

    return bind(x, lambda v: bind(tirx.abs(v), lambda a: both(v, a)))


_ERF_SMALL = (
    -5.96761703e-4,
    4.99119423e-3,
    -2.67681349e-2,
    1.12819925e-1,
    -3.76125336e-1,
    1.28379166e-1,
)
_ERF_LARGE = (
    1.72853470e-5,
    -3.83197126e-4,
    3.88396438e-3,
    -2.42546219e-2,
    1.06777877e-1,
    6.34846687e-1,
    1.28717512e-1,
)


def erf(x: Any) -> Any:
    """Two ranges: x + x * P(x * x) near zero, 1 - e**Q(|x|) beyond."""

    def of(v: Any) -> Any:
        return bind(tirx.abs(v), lambda a: both(v, a))

    def both(v: Any, a: Any) -> Any:
        small = bind(v * v, lambda s: horner(s, _ERF_SMALL) * v + v)
        # e**-(a + a * Q(a)) has sunk below half a unit in the last place of 1 well before 4.
        capped = tirx.Select(a > f32(4.0), f32(4.0), a)
        large = bind(
            capped,
            lambda c: bind(
                f32(1.0) - exp(f32(0.0) - (horner(c, _ERF_LARGE) * c + c)),
                lambda y: tirx.Select(v < f32(0.0), f32(0.0) - y, y),
            ),
        )
        return tirx.Select(a > f32(0.927734375), large, small)

    return bind(x, of)


_LOG = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)


def log(x: Any) -> Any:
    """The natural logarithm: -inf at 0, NaN below, denormals included."""

    def of(v: Any) -> Any:
        # Denormals are lifted by 2**23, which the exponent gives back.
        low = v < f32(1.17549435e-38)
        return bind(
            tirx.reinterpret("int32", tirx.Select(low, v * f32(8388608.0), v)),
            lambda bits: bind(
                # The exponent of the power of two that brings x into [sqrt(1/2), sqrt(2)).
                (bits - i32(0x3F3504F3)) >> i32(23),
                lambda e: whole(v, bits, e, low),
            ),
        )

    def whole(v: Any, bits: Any, e: Any, low: Any) -> Any:
        n = tirx.Cast(F32, e - tirx.Select(low, i32(23), i32(0)))
        return bind(
            tirx.reinterpret(F32, bits - (e << i32(23))) - f32(1.0),
            lambda f: bind(n, lambda m: ends(v, series(f, m))),
        )

    def series(f: Any, n: Any) -> Any:
        return bind(
            f * f,
            lambda s: (
                (horner(f, _LOG) * f * s + n * f32(_LN2_LOW) - f32(0.5) * s)
                + f
                + n * f32(_LN2_HIGH)
            ),
        )

    def ends(v: Any, y: Any) -> Any:
        inf = tirx.const(math.inf, F32)
        positive = tirx.Select(v < inf, y, v)
        zero = tirx.Select(v == f32(0.0), f32(-math.inf), positive)
        return tirx.Select(v < f32(0.0), tirx.const(math.nan, F32), zero)

    return bind(x, of, "x")


def log1p(x: Any) -> Any:
    """log(1 + x), with what the sum rounded away put back."""

    def of(v: Any) -> Any:
        return bind(f32(1.0) + v, lambda u: corrected(v, u))

    def corrected(v: Any, u: Any) -> Any:
        lost = (v - (u - f32(1.0))) / u
        usable = tirx.And(u > f32(0.0), u < tirx.const(math.inf, F32))
        tiny = tirx.abs(v) < f32(1e-7)
        return tirx.Select(tiny, v, log(u) + tirx.Select(usable, lost, f32(0.0)))

    return bind(x, of, "x")


_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "tirx.exp": exp,
    "tirx.sigmoid": sigmoid,
    "tirx.tanh": tanh,
    "tirx.erf": erf,
    "tirx.log": log,
    "tirx.log1p": log1p,
}
_FLOATS = ("float16", "float32", "float64")
_LARGEST = {
    3.4028234663852886e38,  # float32
    1.7976931348623157e308,
    65504.0,  # float16
    3.3895313892515355e38,  # bfloat16
}


def _extreme(node: Any, larger: bool) -> Any:
    return _take_nan(node.a, node.b, larger) if str(node.ty.dtype) in _FLOATS else node


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


class VectorMath(Rewriter):
    """Puts the functions of this module in the place of calls to libm."""

    def visit_BufferStore(self, node: Any) -> Any:
        """Any store; the neutral element of a max or min is infinite, where TVM's is finite."""
        new = Rewriter.store(self, node)
        value = new.value
        wide = value.value if isinstance(value, tirx.Cast) else value
        if not isinstance(wide, tirx.FloatImm) or abs(float(wide.value)) not in _LARGEST:
            return new
        infinite = tirx.const(math.copysign(math.inf, float(wide.value)), str(wide.ty.dtype))
        if isinstance(value, tirx.Cast):
            infinite = tirx.Cast(value.ty.dtype, infinite)
        return tirx.BufferStore(new.buffer, infinite, list(new.indices))

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
        name = getattr(node.op, "name", "")
        if name == "tirx.isnan" and str(node.args[0].ty.dtype) in _FLOATS:
            return bind(node.args[0], _is_nan, "x")
        function = _FUNCTIONS.get(name)
        if function is None:
            return node
        dtype = str(node.ty.dtype)
        if dtype == F32:
            return function(node.args[0])
        if dtype == "float16":
            return tirx.Cast(dtype, function(tirx.Cast(F32, node.args[0])))
        return node
