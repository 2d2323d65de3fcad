"""Airy's function and the scaled complement of the error function, in double precision."""

from __future__ import annotations

import math
from typing import Any

import torch

from . import chebyshev_tables as tables
from . import rational_tables as rational
from .common import tirx
from .doubles import call, cases, expansion, number, ratio, register
from .statements import keep

aten = torch.ops.aten
prims = torch.ops.prims

# Up to here, on both sides, the function itself is expanded; where it is less than any double.
_NEAR, _GONE = 2.09, 103.892
# The argument of (1 + 2 x) erfcx(x) that is the middle of its expansion.
_MIDDLE = 3.75


def airy_ai(x: Any) -> Any:
    """Waves below 0, decay above it; NaN at the infinities."""

    def waves() -> Any:
        size = keep(number(0.0) - x)
        root = keep(tirx.sqrt(size))
        zeta = keep(number(2.0) * size * root / number(3.0))
        inverse = keep(number(1.0) / zeta)
        square = keep(inverse * inverse)
        f = number(1.0) + square * ratio(square, rational.AIRY_F_P, rational.AIRY_F_Q)
        g = inverse * ratio(square, rational.AIRY_G_P, rational.AIRY_G_Q)
        phase = keep(zeta + number(math.pi / 4))
        wave = call("sin", phase) * f - call("cos", phase) * g
        return wave / (number(math.sqrt(math.pi)) * tirx.sqrt(root))

    def decay() -> Any:
        root = keep(tirx.sqrt(x))
        zeta = keep(number(2.0) * x * root / number(3.0))
        nearest = 2.0 / 3.0 * _NEAR * math.sqrt(_NEAR)
        at = keep(number(2.0 * nearest) / zeta - number(1.0))
        value = expansion(at, tables.AIRY_FAR) * call("exp", number(0.0) - zeta)
        return value / (number(2.0 * math.sqrt(math.pi)) * tirx.sqrt(root))

    infinite = tirx.EQ(tirx.abs(x), number(math.inf))
    return cases(
        [
            (infinite, lambda: number(math.nan)),
            (x > number(_GONE), lambda: number(0.0)),
            (x < number(-_NEAR), waves),
            (x <= number(_NEAR), lambda: expansion(keep(x / number(_NEAR)), tables.AIRY_NEAR)),
        ],
        decay,
    )


def erfcx(x: Any) -> Any:
    """``exp(x * x) * erfc(x)``, which falls as slowly as 1 / x."""
    size = keep(tirx.abs(x))
    at = keep(number(1.0) - number(2.0 * _MIDDLE) / (size + number(_MIDDLE)))
    value = keep(expansion(at, tables.ERFCX) / (number(1.0) + number(2.0) * size))

    def below() -> Any:
        return number(2.0) * call("exp", x * x) - value

    return cases([(x < number(0.0), below)], lambda: value)


register("airy_ai", airy_ai, aten.special_airy_ai.default)
register("erfcx", erfcx, aten.special_erfcx.default, prims.erfcx.default)
