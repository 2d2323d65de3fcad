"""Hyperbolic functions, and the angles that trigonometric and hyperbolic functions belong to.

The polynomials are those of Moshier's Cephes for single precision.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx

from .polynomials import bind, f32, half_exp, horner, log, with_sign

_SINH = (2.03721912945e-4, 8.33028376239e-3, 1.66667160211e-1)
_ASINH = (2.0122003309e-2, -4.2699340972e-2, 7.4847586088e-2, -1.6666288134e-1)
_ACOSH = (1.7596881071e-3, -7.5272886713e-3, 2.6454905019e-2, -1.1784741703e-1, 1.4142135263)
_ATANH = (1.81740078349e-1, 8.24370301058e-2, 1.46691431730e-1, 1.99782164500e-1, 3.33337300303e-1)
_ASIN = (4.2163199048e-2, 2.4181311049e-2, 4.5470025998e-2, 7.4953002686e-2, 1.6666752422e-1)
_ATAN = (8.05374449538e-2, -1.38776856032e-1, 1.99777106478e-1, -3.33329491539e-1)
_HALF_PI, _HALF_PI_LOW = 1.57079637050628662109375, -4.37113900018624283e-8
_PI, _PI_LOW = 3.1415927410125732421875, -8.74227800037248566e-8


def _of_magnitude(x: Any, body: Any) -> Any:
    """An odd function: `body(|x|)` with the sign of `x`."""
    return bind(x, lambda v: bind(tirx.abs(v), lambda a: with_sign(v, body(a))), "x")


def sinh(x: Any) -> Any:
    """(e**x - e**-x) / 2."""

    def of(a: Any) -> Any:
        small = bind(a * a, lambda s: horner(s, _SINH) * s * a + a)
        large = bind(half_exp(a), lambda h: h - f32(0.25) / h)
        return tirx.Select(a < f32(1.0), small, large)

    return _of_magnitude(x, of)


def cosh(x: Any) -> Any:
    """(e**x + e**-x) / 2."""
    return bind(half_exp(tirx.abs(x)), lambda h: h + f32(0.25) / h)


def asinh(x: Any) -> Any:
    """log(x + sqrt(x * x + 1))."""

    def of(a: Any) -> Any:
        small = bind(a * a, lambda s: horner(s, _ASINH) * s * a + a)
        huge = a > f32(1500.0)
        root = tirx.Select(huge, a, a + tirx.sqrt(a * a + f32(1.0)))
        large = log(root) + tirx.Select(huge, f32(math.log(2.0)), f32(0.0))
        return tirx.Select(a < f32(0.5), small, large)

    return _of_magnitude(x, of)


def acosh(x: Any) -> Any:
    """log(x + sqrt(x * x - 1)); NaN below 1."""

    def of(v: Any, z: Any) -> Any:
        small = tirx.sqrt(z) * horner(z, _ACOSH)
        huge = v > f32(1500.0)
        root = tirx.Select(huge, v, v + tirx.sqrt(z * (v + f32(1.0))))
        large = log(root) + tirx.Select(huge, f32(math.log(2.0)), f32(0.0))
        return tirx.Select(z < f32(0.5), small, large)

    return bind(x, lambda v: bind(v - f32(1.0), lambda z: of(v, z)), "x")


def atanh(x: Any) -> Any:
    """log((1 + x) / (1 - x)) / 2; infinite at 1, NaN beyond."""

    def of(a: Any) -> Any:
        small = bind(a * a, lambda s: horner(s, _ATANH) * s * a + a)
        large = f32(0.5) * log((f32(1.0) + a) / (f32(1.0) - a))
        return tirx.Select(a < f32(0.5), small, large)

    return _of_magnitude(x, of)


def _asin_parts(a: Any, body: Any) -> Any:
    """`body(big, y)`: the arcsine of `a`, or of the root of (1 - a) / 2 where `a` is big."""

    def of(big: Any, z: Any) -> Any:
        root = tirx.Select(big, tirx.sqrt(z), a)
        return bind(root, lambda s: bind(horner(z, _ASIN) * z * s + s, lambda y: body(big, y)))

    big = a > f32(0.5)
    return bind(tirx.Select(big, f32(0.5) * (f32(1.0) - a), a * a), lambda z: of(big, z))


def asin(x: Any) -> Any:
    """The arcsine; NaN beyond 1."""

    def of(a: Any) -> Any:
        return _asin_parts(
            a,
            lambda big, y: tirx.Select(big, f32(_HALF_PI) - (f32(2.0) * y - f32(_HALF_PI_LOW)), y),
        )

    return _of_magnitude(x, of)


def acos(x: Any) -> Any:
    """The arccosine; NaN beyond 1."""

    def of(v: Any, big: Any, y: Any) -> Any:
        below = v < f32(0.0)
        twice = f32(2.0) * y
        far = tirx.Select(below, f32(_PI) - (twice - f32(_PI_LOW)), twice)
        signed = tirx.Select(below, f32(0.0) - y, y)
        return tirx.Select(big, far, f32(_HALF_PI) - (signed - f32(_HALF_PI_LOW)))

    return bind(
        x,
        lambda v: bind(tirx.abs(v), lambda a: _asin_parts(a, lambda big, y: of(v, big, y))),
        "x",
    )


def _turned(least: Any, most: Any, body: Any) -> Any:
    """`body(start, y)`: the angle of ``least / most`` is ``start + y``, `y` at most pi / 8."""
    middle = least > f32(0.41421356) * most
    top = tirx.Select(middle, least - most, least)
    bottom = tirx.Select(middle, least + most, most)
    start = tirx.Select(middle, f32(_HALF_PI / 2), f32(0.0))
    return bind(
        top / bottom,
        lambda t: bind(
            t * t, lambda z: bind(horner(z, _ATAN) * z * t + t, lambda y: body(start, y))
        ),
    )


def atan(x: Any) -> Any:
    """The arctangent."""

    def of(a: Any) -> Any:
        steep = a > f32(1.0)
        part = tirx.Select(steep, f32(1.0) / a, a)
        return _turned(part, f32(1.0), lambda start, y: joined(steep, start, y))

    def joined(steep: Any, start: Any, y: Any) -> Any:
        return bind(
            start + y, lambda t: tirx.Select(steep, f32(_HALF_PI) - (t - f32(_HALF_PI_LOW)), t)
        )

    return _of_magnitude(x, of)


def atan2(y: Any, x: Any) -> Any:
    """The angle of a point, the signs of zeros included; NaN where either is."""

    def of(v: Any, w: Any, a: Any, b: Any) -> Any:
        steep = a > b
        least, most = tirx.Select(steep, b, a), tirx.Select(steep, a, b)
        # Two infinities make an angle as two ones do, two zeros as 0 and 1 do. A NaN in `a` is
        # the lesser, one in `b` the greater.
        infinity = tirx.const(math.inf, "float32")
        equal = tirx.And(least == infinity, most == infinity)
        ratio = tirx.Select(most == f32(0.0), least, tirx.Select(equal, f32(1.0), least / most))
        return bind(
            ratio,
            lambda r: _turned(r, f32(1.0), lambda s, t: quadrant(v, w, steep, s + t)),
        )

    def quadrant(v: Any, w: Any, steep: Any, angle: Any) -> Any:
        left = tirx.reinterpret("int32", w) < tirx.const(0, "int32")
        return bind(
            angle,
            lambda t: bind(
                tirx.Select(steep, f32(_HALF_PI) - (t - f32(_HALF_PI_LOW)), t),
                lambda u: with_sign(v, tirx.Select(left, f32(_PI) - (u - f32(_PI_LOW)), u)),
            ),
        )

    return bind(
        y,
        lambda v: bind(
            x,
            lambda w: bind(tirx.abs(v), lambda a: bind(tirx.abs(w), lambda b: of(v, w, a, b))),
        ),
        "y",
    )
