"""Elementary functions as polynomials, so that a loop over them runs in vector registers.

LLVM calls libm once per element for exp, erf, tanh and log, even inside a vector loop. Float32 gets
polynomials within a few units in the last place, float16 and bfloat16 the same through float32;
float64 stays with libm. Bounds are stated in `vectormath`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from tvm import tirx

F32 = "float32"
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# Adding this rounds a float32 below 2**22 to a whole number and leaves it in the low bits.
_ROUND = 12582912.0
_ROUND_BITS = 0x4B400000


#: Whether vectors are multiplied by powers of two in one instruction, as AVX-512 does.
SCALES: ContextVar[bool] = ContextVar("SCALES", default=False)


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


def clamped(x: Any, least: float, most: float) -> Any:
    """`x` within two bounds; NaN passes both, as comparisons with it are false."""
    low, high = (tirx.const(v, x.ty.dtype) for v in (least, most))
    top = tirx.Select(x > high, high, x)
    return bind(top, lambda b: tirx.Select(b < low, low, b))


def unless(nothing: Any, x: Any, power: Callable[[Any], Any]) -> Any:
    """`power(x)`, or 0 where that is below all floats.

    Code that lets it underflow takes five to fifty times as long as where nothing does.
    """
    zero = tirx.const(0.0, x.ty.dtype)
    inside = tirx.Select(nothing, zero, x)
    return bind(power(inside), lambda y: tirx.Select(nothing, zero, y))


def within(x: Any, least: float, most: float, power: Callable[[Any], Any]) -> Any:
    """`power` of no more than `most`, and 0 below `least`; NaN passes."""
    low, high = (tirx.const(v, x.ty.dtype) for v in (least, most))
    return bind(x, lambda v: unless(v < low, tirx.Select(v > high, high, v), power), "x")


#: Integers as wide as floats.
WORDS = {"float16": "int16", "float32": "int32", "float64": "int64"}


def copysign(x: Any, y: Any) -> Any:
    """The magnitude of `x` with the sign bit of `y`, that of zero and NaN included."""
    kind = str(x.ty.dtype)
    word = WORDS[kind]
    sign, rest = tirx.min_value(word), tirx.max_value(word)
    bits = tirx.reinterpret(word, x) & rest
    return tirx.reinterpret(kind, bits | (tirx.reinterpret(word, y) & sign))


def with_sign(x: Any, y: Any) -> Any:
    """The magnitude `y` with the sign bit of `x`, that of zero and NaN included."""
    bits = tirx.reinterpret("int32", x) & tirx.min_value("int32")
    return tirx.reinterpret(F32, tirx.reinterpret("int32", y) | bits)


def _whole_and_rest(x: Any, scale: float, rest: Callable[[Any, Any], Any], body: Any) -> Any:
    """`body(m, r)` of the whole number `m` nearest to ``x * scale`` and ``rest(x, m)``."""

    def split(v: Any, t: Any) -> Any:
        return bind(
            t - f32(_ROUND),
            lambda n: bind(
                rest(v, n),
                lambda r: bind(
                    tirx.reinterpret("int32", t) - i32(_ROUND_BITS), lambda m: body(m, r)
                ),
            ),
        )

    return bind(x, lambda v: bind(v * f32(scale) + f32(_ROUND), lambda t: split(v, t)))


def _by_ln2(x: Any, body: Any) -> Any:
    """`body(m, r)` where ``e**x`` is ``2**m * e**r`` and `r` is at most half of ln 2."""
    return _whole_and_rest(
        x,
        math.log2(math.e),
        lambda v, n: (v - n * f32(_LN2_HIGH)) - n * f32(_LN2_LOW),
        body,
    )


def _less_one(r: Any) -> Any:
    """e**r - 1 for `r` of at most half of ln 2."""
    return horner(r, _EXP) * r * r + r


def _scaled(p: Any, m: Any) -> Any:
    """``p * 2**m`` in two steps: 2**m alone leaves the range of float32 at both ends."""
    if SCALES.get():
        return tirx.call_llvm_pure_intrin(F32, "llvm.ldexp", p, m)
    return bind(m >> i32(1), lambda h: p * _pow2(h) * _pow2(m - h))


def exp(x: Any) -> Any:
    """e**x; NaN stays, overflow is inf, underflow passes through the denormals."""
    return within(x, -104.0, 89.0, _power)


def _power(x: Any) -> Any:
    """e**x from -104 to 89."""
    return _by_ln2(x, lambda m, r: _scaled(_less_one(r) + f32(1.0), m))


def _exp_down(x: Any) -> Any:
    """e**x of no more than 0 and no less than -87."""
    return _by_ln2(x, lambda m, r: (_less_one(r) + f32(1.0)) * _pow2(m))


def exp2(x: Any) -> Any:
    """2**x; as `exp`."""

    def power(x: Any) -> Any:
        return _whole_and_rest(
            x,
            1.0,
            lambda v, n: (v - n) * f32(math.log(2.0)),
            lambda m, r: _scaled(_less_one(r) + f32(1.0), m),
        )

    return within(x, -151.0, 129.0, power)


def expm1(x: Any) -> Any:
    """e**x - 1, with all its digits near zero."""

    def of(v: Any) -> Any:
        y = _by_ln2(clamped(v, -18.0, 89.0), joined)
        return tirx.Select(tirx.abs(v) < f32(1e-8), v, y)

    def joined(m: Any, r: Any) -> Any:
        # Half of it, as 2**128 is no float32.
        return bind(_pow2(m - i32(1)), lambda s: (_less_one(r) * s + (s - f32(0.5))) * f32(2.0))

    return bind(x, of, "x")


def half_exp(x: Any) -> Any:
    """e**x / 2 from 0 up, as far as that is a float32."""
    return _by_ln2(
        clamped(x, 0.0, 90.0),
        lambda m, r: bind(m - i32(1), lambda k: _scaled(_less_one(r) + f32(1.0), k)),
    )


_EXP = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)


#: From here on e**x is no float32, and eager's sigmoid of -x is 0.
_OVERFLOW = 88.72284


def sigmoid(x: Any, least: float = -104.0) -> Any:
    """1 / (1 + e**-x), exact in both tails; 0 below `least`, of which e**x is next to 0."""

    def of(v: Any, a: Any) -> Any:
        # From the first bound on, 1 plus e**-x is 1.
        far = a > tirx.Select(v > f32(0.0), f32(87.0), f32(-least))
        return bind(
            unless(far, f32(0.0) - a, _power),
            lambda e: tirx.Select(v > f32(0.0), f32(1.0), e) / (f32(1.0) + e),
        )

    return bind(x, lambda v: bind(tirx.abs(v), lambda a: of(v, a)), "x")


def gate(x: Any) -> Any:
    """The sigmoid as a factor: 0 from where eager's is.

    Otherwise its products are denormals, and a convolution that reads some of them takes several
    times as long.
    """
    return sigmoid(x, -_OVERFLOW)


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


def erf_small(v: Any) -> Any:
    """The error function below 0.927."""
    return bind(v * v, lambda s: horner(s, _ERF_SMALL) * v + v)


def erf(x: Any) -> Any:
    """Two ranges: x + x * P(x * x) near zero, 1 - e**Q(|x|) beyond."""

    def of(v: Any) -> Any:
        return bind(tirx.abs(v), lambda a: both(v, a))

    def both(v: Any, a: Any) -> Any:
        small = erf_small(v)
        falling = [-q for q in _ERF_LARGE]
        # e**-(a + a * Q(a)) has sunk below half a unit in the last place of 1 well before 4.
        capped = tirx.Select(a > f32(4.0), f32(4.0), a)
        large = bind(
            capped,
            lambda c: bind(
                f32(1.0) - _exp_down(horner(c, falling) * c - c),
                lambda y: with_sign(v, y),
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


def _log(x: Any, joined: Callable[[Any, Any], Any]) -> Any:
    """``joined(n, y)`` of ``2**n * e**y``, `y` near 0: -inf at 0, NaN below, denormals included."""

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
            lambda f: bind(n, lambda m: ends(v, joined(f, m))),
        )

    def ends(v: Any, y: Any) -> Any:
        inf = tirx.const(math.inf, F32)
        positive = tirx.Select(v < inf, y, v)
        zero = tirx.Select(v == f32(0.0), f32(-math.inf), positive)
        return tirx.Select(v < f32(0.0), tirx.const(math.nan, F32), zero)

    return bind(x, of, "x")


def log(x: Any) -> Any:
    """The natural logarithm."""

    def joined(f: Any, n: Any) -> Any:
        return bind(
            f * f,
            lambda s: (
                (horner(f, _LOG) * f * s + n * f32(_LN2_LOW) - f32(0.5) * s)
                + f
                + n * f32(_LN2_HIGH)
            ),
        )

    return _log(x, joined)


def _log_to_base(x: Any, whole: tuple[float, float], rest: tuple[float, float]) -> Any:
    """A logarithm by that of 2 and that of e in its base, each as two numbers."""

    def joined(f: Any, n: Any) -> Any:
        return bind(
            f * f,
            lambda s: bind(
                horner(f, _LOG) * f * s - f32(0.5) * s,
                lambda y: (
                    n * f32(whole[1])
                    + (y * f32(rest[1]) + f * f32(rest[1]))
                    + y * f32(rest[0])
                    + f * f32(rest[0])
                    + n * f32(whole[0])
                ),
            ),
        )

    return _log(x, joined)


def log2(x: Any) -> Any:
    """The logarithm to base 2, exact at powers of it."""
    return _log_to_base(x, (1.0, 0.0), (1.4375, 5.195040888963407e-3))


def log10(x: Any) -> Any:
    """The logarithm to base 10."""
    return _log_to_base(x, (0.30078125, 2.4874566398119521e-4), (0.43359375, 7.0073190325182765e-4))


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
