"""Sine, cosine and tangent as polynomials, for arguments that are not too large.

The quadrant and what is left within it are computed in float64, so that no digit is lost near the
zeros; the polynomials are those of Moshier's Cephes for single precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm import tirx

from .polynomials import F32, bind, f32, horner, i32

LIMIT = 2.0**20  # the count of quadrants has to be exact in float32
# Half of pi: its first 33 bits, whose products with such counts are exact, and the rest.
_HIGH, _LOW = 1.57079632673412561417, 6.07710050650619224932e-11
_ROUND64, _ROUND32 = 1.5 * 2.0**52, 1.5 * 2.0**23
_SIN = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
_TAN = (
    9.38540185543e-3,
    3.11992232697e-3,
    2.44301354525e-2,
    5.34112807005e-2,
    1.33387994085e-1,
    3.33331568548e-1,
)


def _reduced(x: Any, body: Callable[[Any, Any], Any]) -> Any:
    """`body(q, r)`: `x` is `r` beyond `q` quarters of a turn, `q` modulo 4 in its low bits."""

    def f64(value: float) -> Any:
        return tirx.const(value, "float64")

    def split(wide: Any, n: Any) -> Any:
        rest = tirx.Cast(F32, (wide - n * f64(_HIGH)) - n * f64(_LOW))
        count = tirx.reinterpret("int32", tirx.Cast(F32, n) + f32(_ROUND32))
        return bind(rest, lambda r: bind(count, lambda q: body(q, r)))

    return bind(
        tirx.Cast("float64", x),
        lambda wide: bind(
            wide * f64(2.0 / math.pi) + f64(_ROUND64),
            lambda t: bind(t - f64(_ROUND64), lambda n: split(wide, n)),
        ),
    )


def _quadrant(q: Any, r: Any) -> Any:
    """The sine of `r` beyond `q` quarters of a turn."""

    def chosen(z: Any) -> Any:
        sine = horner(z, _SIN) * z * r + r
        cosine = horner(z, _COS) * z * z - f32(0.5) * z + f32(1.0)
        return tirx.Select((q & i32(1)) == i32(1), cosine, sine)

    sign = (q & i32(2)) << i32(30)
    return bind(r * r, lambda z: tirx.reinterpret(F32, tirx.reinterpret("int32", chosen(z)) ^ sign))


def _small(x: Any, y: Any) -> Any:
    """`x` itself near zero, whose sign `y` has lost."""
    return tirx.Select(tirx.abs(x) < f32(1e-4), x, y)


def sin(x: Any) -> Any:
    """The sine of at most `LIMIT`."""
    return bind(x, lambda v: _small(v, _reduced(v, _quadrant)), "x")


def cos(x: Any) -> Any:
    """The cosine of at most `LIMIT`."""
    return _reduced(x, lambda q, r: bind(q + i32(1), lambda k: _quadrant(k, r)))


def tan(x: Any) -> Any:
    """The tangent of at most `LIMIT`."""

    def of(q: Any, r: Any) -> Any:
        return bind(
            bind(r * r, lambda z: horner(z, _TAN) * z * r + r),
            lambda y: tirx.Select((q & i32(1)) == i32(1), f32(-1.0) / y, y),
        )

    return bind(x, lambda v: _small(v, _reduced(v, of)), "x")
