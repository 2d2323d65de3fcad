"""Elementary functions of float64 as polynomials, as `polynomials` has them for float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx

from .polynomials import bind, clamped, copysign, unless, within

F64, I64 = "float64", "int64"
# ln 2 in two parts, of which the first has zeros for its product with a whole number.
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
# Adding this rounds to a whole number and leaves it in the low bits.
_ROUND = 1.5 * 2.0**52
_ROUND_BITS = 0x4338000000000000


def f64(value: float) -> Any:
    """A float64 constant."""
    return tirx.const(value, F64)


def i64(value: int) -> Any:
    """An int64 constant."""
    return tirx.const(value, I64)


def horner(x: Any, coefficients: Sequence[float], kind: str = F64) -> Any:
    """A polynomial, highest power first."""
    result = tirx.const(coefficients[0], kind)
    for c in coefficients[1:]:
        result = result * x + tirx.const(c, kind)
    return result


def _pow2(n: Any) -> Any:
    """2**n of an int64 within [-1022, 1023], by its exponent bits."""
    return tirx.reinterpret(F64, (n + i64(1023)) << i64(52))


def _by_ln2(x: Any, body: Callable[[Any, Any], Any]) -> Any:
    """`body(m, r)` where ``e**x`` is ``2**m * e**r`` and `r` is at most half of ln 2."""

    def split(v: Any, t: Any) -> Any:
        return bind(
            t - f64(_ROUND),
            lambda n: bind(
                (v - n * f64(_LN2_HIGH)) - n * f64(_LN2_LOW),
                lambda r: bind(tirx.reinterpret(I64, t) - i64(_ROUND_BITS), lambda m: body(m, r)),
            ),
        )

    return bind(x, lambda v: bind(v * f64(math.log2(math.e)) + f64(_ROUND), lambda t: split(v, t)))


# Interpolates (e**r - 1 - r) / r**2 at Chebyshev's points.
_EXP = (
    2.0914686968086876e-09,
    2.5105217004720745e-08,
    2.75572736431103e-07,
    2.7557255400206422e-06,
    2.4801587325547743e-05,
    0.00019841269874820627,
    0.0013888888888883748,
    0.008333333333326136,
    0.04166666666666667,
    0.1666666666666667,
    0.5,
)


def _less_one(r: Any) -> Any:
    """e**r - 1 for `r` of at most half of ln 2."""
    return horner(r, _EXP) * r * r + r


def _grown(r: Any) -> Any:
    """e**r for `r` of at most half of ln 2; what the sum of 1 and `r` rounds away is put back."""

    def of(one: Any) -> Any:
        lost = r - (one - f64(1.0))
        return one + (horner(r, _EXP) * r * r + lost)

    return bind(f64(1.0) + r, of)


def _scaled(p: Any, m: Any) -> Any:
    """``p * 2**m`` in two steps: 2**m alone leaves the range of float64 at both ends."""
    return bind(m >> i64(1), lambda h: p * _pow2(h) * _pow2(m - h))


def exp(x: Any) -> Any:
    """e**x; NaN stays, overflow is inf, underflow passes through the denormals."""
    return within(x, -746.0, 710.0, _power)


def _power(x: Any) -> Any:
    """e**x from -746 to 710."""
    return _by_ln2(x, lambda m, r: _scaled(_grown(r), m))


def exp_down(x: Any) -> Any:
    """e**x of no more than 0 and no less than -700."""
    return _by_ln2(x, lambda m, r: _grown(r) * _pow2(m))


def expm1(x: Any) -> Any:
    """e**x - 1, with all its digits near zero."""

    def of(v: Any) -> Any:
        y = _by_ln2(clamped(v, -40.0, 710.0), joined)
        return tirx.Select(tirx.abs(v) < f64(1e-17), v, y)

    def joined(m: Any, r: Any) -> Any:
        # Half of it, as 2**1024 is no float64.
        return bind(_pow2(m - i64(1)), lambda s: (_less_one(r) * s + (s - f64(0.5))) * f64(2.0))

    return bind(x, of, "x")


def sigmoid(x: Any) -> Any:
    """1 / (1 + e**-x), exact in both tails."""

    def of(v: Any, a: Any) -> Any:
        # From here on 1 plus e**-x is 1, and 0 is the float nearest to e**x.
        far = a > tirx.Select(v > f64(0.0), f64(700.0), f64(746.0))
        return bind(
            unless(far, f64(0.0) - a, _power),
            lambda e: tirx.Select(v > f64(0.0), f64(1.0), e) / (f64(1.0) + e),
        )

    return bind(x, lambda v: bind(tirx.abs(v), lambda a: of(v, a)), "x")


def tanh(x: Any) -> Any:
    """e**(2 |x|) - 1, by 2 more than that."""

    def of(v: Any, a: Any) -> Any:
        # From 22 on it is 1.
        twice = tirx.Select(a > f64(22.0), f64(44.0), a + a)
        grown = _by_ln2(
            twice,
            lambda m, r: bind(_pow2(m), lambda s: _less_one(r) * s + (s - f64(1.0))),
        )
        y = bind(grown, lambda g: g / (g + f64(2.0)))
        # Of the smallest numbers, 2 and back is not exact in the last place.
        return tirx.Select(a < f64(1e-9), v, copysign(y, v))

    return bind(x, lambda v: bind(tirx.abs(v), lambda a: of(v, a)))


# fdlibm's, of log(1 + f) in s = f / (2 + f).
_LOG = (
    1.479819860511658591e-01,
    1.531383769920937332e-01,
    1.818357216161805012e-01,
    2.222219843214978396e-01,
    2.857142874366239149e-01,
    3.999999999940941908e-01,
    6.666666666666735130e-01,
)


def log(x: Any) -> Any:
    """The natural logarithm: -inf at 0, NaN below, denormals included."""

    def of(v: Any) -> Any:
        low = v < f64(2.2250738585072014e-308)
        lifted = tirx.Select(low, v * f64(2.0**54), v)
        return bind(
            tirx.reinterpret(I64, lifted),
            lambda bits: bind(
                # The exponent of the power of two that brings x into [sqrt(1/2), sqrt(2)).
                (bits - i64(0x3FE6A09E667F3BCD)) >> i64(52),
                lambda e: whole(v, bits, e, low),
            ),
        )

    def whole(v: Any, bits: Any, e: Any, low: Any) -> Any:
        n = tirx.Cast(F64, e - tirx.Select(low, i64(54), i64(0)))
        f = tirx.reinterpret(F64, bits - (e << i64(52))) - f64(1.0)
        return bind(f, lambda f: bind(n, lambda n: ends(v, joined(f, n))))

    def joined(f: Any, n: Any) -> Any:
        def of(s: Any, half: Any) -> Any:
            rest = bind(s * s, lambda z: horner(z, _LOG) * z)
            return n * f64(_LN2_HIGH) - ((half - (s * (half + rest) + n * f64(_LN2_LOW))) - f)

        return bind(f / (f64(2.0) + f), lambda s: bind(f64(0.5) * f * f, lambda half: of(s, half)))

    def ends(v: Any, y: Any) -> Any:
        positive = tirx.Select(v < f64(math.inf), y, v)
        zero = tirx.Select(v == f64(0.0), f64(-math.inf), positive)
        return tirx.Select(v < f64(0.0), f64(math.nan), zero)

    return bind(x, of, "x")


def log1p(x: Any) -> Any:
    """log(1 + x), with what the sum rounded away put back."""

    def of(v: Any) -> Any:
        return bind(f64(1.0) + v, lambda u: corrected(v, u))

    def corrected(v: Any, u: Any) -> Any:
        lost = (v - (u - f64(1.0))) / u
        usable = tirx.And(u > f64(0.0), u < f64(math.inf))
        tiny = tirx.abs(v) < f64(1e-16)
        return tirx.Select(tiny, v, log(u) + tirx.Select(usable, lost, f64(0.0)))

    return bind(x, of, "x")
