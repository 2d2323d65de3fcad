"""Bessel functions of orders 0 and 1, computed in double precision and rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import chebyshev_tables as tables
from . import rational_tables as rational
from .common import tirx
from .doubles import call, cases, expansion, number, ratio, register
from .special import i0e, i1e
from .statements import keep

aten = torch.ops.aten
prims = torch.ops.prims

# Up to here the approximations in powers are used, beyond it Hankel's.
_NEAR = 5.0
# Squares of the first two positive zeros of J0 and of J1.
_ZEROS = ((5.783185962946784, 30.471262343662087), (14.681970642123893, 49.2184563216946))


def _first_near(x: Any, order: int) -> Any:
    square = keep(x * x)
    zeros = (square - number(_ZEROS[order][0])) * (square - number(_ZEROS[order][1]))
    if order == 0:
        return keep(zeros * ratio(square, rational.J0_NEAR_P, rational.J0_NEAR_Q))
    return keep(x * zeros * ratio(square, rational.J1_NEAR_P, rational.J1_NEAR_Q))


def _hankel(x: Any, order: int) -> tuple[Any, Any, Any]:
    """Amplitudes of cosine and sine beyond 5, and the phase."""
    inverse = keep(number(_NEAR) / x)
    at = keep(inverse * inverse)
    if order == 0:
        p = ratio(at, rational.FAR0_P, rational.FAR0_Q)
        q = ratio(at, rational.FAR0_R, rational.FAR0_S)
    else:
        p = ratio(at, rational.FAR1_P, rational.FAR1_Q)
        q = ratio(at, rational.FAR1_R, rational.FAR1_S)
    size = keep(number(math.sqrt(2.0 / math.pi)) / tirx.sqrt(x))
    return size * p, size * inverse * q, keep(x - number((2 * order + 1) * math.pi / 4))


def _first(order: int) -> Callable[[Any], Any]:
    """J of order 0, even, or of order 1, odd; NaN at the infinities."""

    def value(x: Any) -> Any:
        size = keep(tirx.abs(x))

        def far() -> Any:
            p, q, phase = _hankel(size, order)
            wave = keep(p * call("cos", phase) - q * call("sin", phase))
            return wave if order == 0 else tirx.copysign(number(1.0), x) * wave

        return cases([(size <= number(_NEAR), lambda: _first_near(x, order))], far)

    return value


def _second_far(x: Any, order: int) -> Any:
    p, q, phase = _hankel(x, order)
    return p * call("sin", phase) + q * call("cos", phase)


def bessel_y0(x: Any) -> Any:
    """-inf at 0, NaN below it."""

    def near() -> Any:
        regular = ratio(keep(x * x), rational.Y0_NEAR_P, rational.Y0_NEAR_Q)
        return regular + number(2.0 / math.pi) * call("log", x) * _first_near(x, 0)

    return cases([(x <= number(_NEAR), near)], lambda: _second_far(x, 0))


def bessel_y1(x: Any) -> Any:
    """-inf at 0, NaN below it."""

    def near() -> Any:
        regular = x * ratio(keep(x * x), rational.Y1_NEAR_P, rational.Y1_NEAR_Q)
        singular = call("log", x) * _first_near(x, 1) - number(1.0) / x
        return regular + number(2.0 / math.pi) * singular

    at_zero = (tirx.EQ(x, number(0.0)), lambda: number(-math.inf))
    return cases([at_zero, (x <= number(_NEAR), near)], lambda: _second_far(x, 1))


def spherical_bessel_j0(x: Any) -> Any:
    """sin(x) / x; 0 at the infinities."""
    return cases(
        [
            (tirx.EQ(x, number(0.0)), lambda: number(1.0)),
            (tirx.EQ(tirx.abs(x), number(math.inf)), lambda: number(0.0)),
        ],
        lambda: call("sin", x) / x,
    )


# -- modified ------------------------------------------------------------------------------------


def _grown(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: keep(function(x) * call("exp", tirx.abs(x)))


modified_bessel_i0, modified_bessel_i1 = _grown(i0e), _grown(i1e)


def _k0_near(x: Any) -> Any:
    regular = expansion(keep(x * x * number(0.5) - number(1.0)), tables.K0_NEAR)
    return keep(regular - call("log", x * number(0.5)) * modified_bessel_i0(x))


def _k1_near(x: Any) -> Any:
    regular = expansion(keep(x * x * number(0.5) - number(1.0)), tables.K1_NEAR)
    return keep(regular / x + call("log", x * number(0.5)) * modified_bessel_i1(x))


def _second(near: Callable[[Any], Any], far: Sequence[float], scaled: bool) -> Callable[[Any], Any]:
    """A function of the second kind: inf at 0, NaN below it.

    Args:
        near: the function from 0 to 2.
        far: the expansion beyond 2.
        scaled: multiply by ``exp(x)``.
    """

    def value(x: Any) -> Any:
        def inner() -> Any:
            return near(x) * call("exp", x) if scaled else near(x)

        def outer() -> Any:
            size = keep(expansion(keep(number(4.0) / x - number(1.0)), far) / tirx.sqrt(x))
            return size if scaled else size * call("exp", number(0.0) - x)

        at_zero = (tirx.EQ(x, number(0.0)), lambda: number(math.inf))
        return cases([at_zero, (x <= number(2.0), inner)], outer)

    return value


register("bessel_j0", _first(0), aten.special_bessel_j0.default, prims.bessel_j0.default)
register("bessel_j1", _first(1), aten.special_bessel_j1.default, prims.bessel_j1.default)
register("bessel_y0", bessel_y0, aten.special_bessel_y0.default)
register("bessel_y1", bessel_y1, aten.special_bessel_y1.default)
register(
    "spherical_bessel_j0",
    spherical_bessel_j0,
    aten.special_spherical_bessel_j0.default,
    prims.spherical_bessel_j0.default,
)
register("modified_bessel_i0", modified_bessel_i0, aten.special_modified_bessel_i0.default)
register("modified_bessel_i1", modified_bessel_i1, aten.special_modified_bessel_i1.default)
for _scaled, _prefix in ((False, ""), (True, "scaled_")):
    for _order, _near, _far in (
        (0, _k0_near, tables.K0_FAR),
        (1, _k1_near, tables.K1_FAR),
    ):
        _name = f"{_prefix}modified_bessel_k{_order}"
        register(_name, _second(_near, _far, _scaled), getattr(aten, f"special_{_name}").default)
