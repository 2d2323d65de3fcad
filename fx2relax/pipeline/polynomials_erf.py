"""The error function for float64, its complement for float32 and float64.

Near zero ``erf(x) / x`` is a polynomial in ``x * x``. Beyond, ``erfc(x) * e**(x * x)`` is one in
``(x - k) / (x + k)``, which keeps all digits of what is left of 1. The coefficients interpolate at
Chebyshev's points, computed with 50 digits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

from . import polynomials as single
from . import polynomials_double as double
from .polynomials import bind

_SMALL = (
    -7.795898827002142e-10,
    1.3720064546777686e-08,
    -1.6208483801871705e-07,
    1.6447424703317362e-06,
    -1.492473690741966e-05,
    0.00012055294904839707,
    -0.0008548325975389692,
    0.0052239776071164225,
    -0.02686617064323777,
    0.11283791670945006,
    -0.37612638903183543,
    1.1283791670955126,
)
_MIDDLE = (
    -2.22812957637235e-07,
    4.146302183268488e-06,
    1.859427387429402e-06,
    -1.4166339069117108e-05,
    -2.7640727821912852e-05,
    2.7560352756678313e-05,
    0.00017436477257256738,
    4.355265359817883e-05,
    -0.0009819771114740715,
    -0.0008471431229415333,
    0.006997461739200575,
    0.0037328924016564484,
    -0.07897858101571269,
    0.24165819424248763,
    -0.4271858474139585,
    0.2553956763105057,
)
_LARGE = (
    -9.455982939872743e-09,
    7.389680444833914e-08,
    5.941337955131871e-08,
    -7.811785785175153e-07,
    3.0842678654442027e-07,
    5.678446518677392e-06,
    -1.1230434994851926e-05,
    -2.4385454299846383e-05,
    0.0001506247026512128,
    -0.000199260546967223,
    -0.0007577739752266992,
    0.005031970657505758,
    -0.016197733962200932,
    0.03716751546515809,
    -0.0663303658198799,
    0.09373283500259434,
    -0.10103906603599298,
    0.06809705425457811,
    0.015379652102614858,
    -0.1396211168405616,
    1.2329951186255526,
)
_LARGE32 = (
    -2.503304277e-04,
    -1.258640899e-03,
    1.168133342e-03,
    8.654272184e-03,
    -8.012014441e-03,
    -5.421018973e-02,
    1.640494317e-01,
    -1.660308987e-01,
    -9.276378155e-02,
    1.276978374e00,
)


def _number(value: float, like: Any) -> Any:
    return tirx.const(value, str(like.ty.dtype))


def _horner(x: Any, coefficients: tuple[float, ...]) -> Any:
    return double.horner(x, coefficients, str(x.ty.dtype))


def _tail(
    a: Any,
    near: float,
    table: tuple[float, ...],
    exp: Callable[[Any], Any],
    *,
    whole: bool = True,
) -> Any:
    """The complement of what is not small; a `whole` table has 1 + 2 x times that."""

    def of(square: Any) -> Any:
        zero = _number(0, a)
        # What rounding has taken from the square: a large one has no digit to spare.
        kind = str(a.ty.dtype)
        rest = tirx.call_llvm_pure_intrin(kind, "llvm.fma", a, a, zero - square)
        place = (a - _number(near, a)) / (a + _number(near, a))
        scale = bind(exp(zero - square), lambda e: e - e * rest)
        if whole:
            scale = scale / (_number(1, a) + (a + a))
        return bind(place, lambda q: _horner(q, table) * scale)

    return bind(a * a, of)


def erf64(x: Any) -> Any:
    """A polynomial up to 1, 1 - erfc beyond."""

    def part(a: Any) -> Any:
        return _tail(a, 2.0, _MIDDLE, double.exp_down, whole=False)

    def of(v: Any, a: Any) -> Any:
        small = bind(v * v, lambda s: _horner(s, _SMALL) * v)
        capped = tirx.Select(a > _number(6, a), _number(6, a), a)
        large = bind(capped, lambda c: _number(1, a) - part(c))
        return tirx.Select(a > _number(1, a), single.copysign(large, v), small)

    return bind(x, lambda v: bind(tirx.abs(v), lambda a: of(v, a)))


def _erfc(
    x: Any,
    small: Callable[[Any], Any],
    most: float,
    tail: Callable[[Any], Any],
) -> Any:
    def of(v: Any, a: Any) -> Any:
        capped = tirx.Select(a > _number(most, a), _number(most, a), a)
        large = bind(
            bind(capped, tail),
            lambda y: tirx.Select(v < _number(0, a), _number(2, a) - y, y),
        )
        return tirx.Select(a > _number(0.5, a), large, _number(1, a) - small(v))

    return bind(x, lambda v: bind(tirx.abs(v), lambda a: of(v, a)))


def erfc64(x: Any) -> Any:
    """1 - erf up to a half, without erf beyond."""
    return _erfc(
        x,
        lambda v: bind(v * v, lambda s: _horner(s, _SMALL) * v),
        28.0,
        lambda a: _tail(a, 4.0, _LARGE, double.exp),
    )


def erfc(x: Any) -> Any:
    """1 - erf up to a half, without erf beyond."""
    return _erfc(x, single.erf_small, 10.1, lambda a: _tail(a, 2.0, _LARGE32, single.exp))
