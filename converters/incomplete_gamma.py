"""The regularised incomplete gamma functions, in double precision.

Of ``P + Q = 1`` the one that does not suffer from the subtraction is computed: P by its series
below a, Q by its continued fraction above it, both by Temme's expansion where a is large and
near x.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import gamma_tables as tables
from .common import Promotion, Unsupported, converts, dtype, tirx
from .doubles import call, cases, number, special
from .opaque import T, local, wide
from .statements import keep

aten = torch.ops.aten

# What may be left out of a series, relative to its sum.
_PRECISE, _COARSE = 2.0**-53, 2.0**-32
_STEPS = 2000
# Temme's expansion: from which a, and how far x may be from it.
_LARGE, _WIDTH = 30.0, 0.4


def _powers(x: Any, coefficients: Sequence[float]) -> Any:
    """A polynomial, its lowest power first."""
    value = number(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        value = keep(value * x + number(c))
    return value


def _log_gamma_above_one(a: Any) -> Any:
    """ln(gamma(1 + a)), to full precision for small a as well."""
    whole = keep(number(1.0) + a)
    lost = keep(tirx.Select(a < number(1.0), a - (whole - number(1.0)), number(0.0)))
    slope = _powers(a, (-0.5772156649015329, 1.6449340668482264, -1.2020569031595942))
    return keep(call("lgamma", whole) + lost * slope)


def _factor(a: Any, x: Any) -> Any:
    """``x ** a * exp(-x) / gamma(a + 1)``."""

    def large() -> Any:
        inverse = keep(number(1.0) / a)
        series = inverse * _powers(keep(inverse * inverse), tables.STIRLING)
        distance = (x - a) / a - call("log", x / a)
        size = number(1.0 / math.sqrt(2.0 * math.pi)) / tirx.sqrt(a)
        return size * call("exp", number(0.0) - a * distance - series)

    def small() -> Any:
        return call("exp", a * call("log", x) - x - _log_gamma_above_one(a))

    return cases([(a >= number(_LARGE), large)], small)


def _iterate(step: Callable[[], Any]) -> None:
    """Run steps until one says that it is the last, or there have been many."""
    count, last = local("int64"), local("bool")
    count[0], last[0] = wide(0), tirx.const(False, "bool")
    with T.While(tirx.And(count[0] < wide(_STEPS), tirx.Not(last[0]))):
        count[0] = count[0] + wide(1)
        last[0] = step()


def _series(a: Any, x: Any, epsilon: float) -> Any:
    """P by powers of x."""
    total, term, place = local("float64"), local("float64"), local("float64")
    total[0], term[0], place[0] = number(1.0), number(1.0), a

    def step() -> Any:
        place[0] = place[0] + number(1.0)
        term[0] = term[0] * x / place[0]
        total[0] = total[0] + term[0]
        return term[0] <= total[0] * number(epsilon)

    _iterate(step)
    return keep(total[0] * _factor(a, x))


def _small_complement(a: Any, x: Any, epsilon: float) -> Any:
    """Q of small numbers: by powers of x, without subtracting from 1."""
    total, term, place = local("float64"), local("float64"), local("float64")
    total[0], term[0], place[0] = number(0.0), number(1.0), number(0.0)

    def step() -> Any:
        place[0] = place[0] + number(1.0)
        term[0] = number(0.0) - term[0] * x / place[0]
        more = keep(term[0] / (a + place[0]))
        total[0] = total[0] + more
        return tirx.abs(more) <= tirx.abs(total[0]) * number(epsilon)

    _iterate(step)
    log = keep(a * call("log", x) - _log_gamma_above_one(a))
    return number(0.0) - call("expm1", log) - a * total[0] * call("exp", log)


def _fraction(a: Any, x: Any, epsilon: float) -> Any:
    """Q by Legendre's continued fraction, evaluated as Lentz does."""
    b, c, d, h = (local("float64") for _ in range(4))
    place = local("float64")
    one = number(1.0)
    place[0] = number(0.0)
    b[0] = x + one - a
    c[0], d[0] = number(1.0 / 1e-300), one / b[0]
    h[0] = d[0]

    def step() -> Any:
        place[0] = place[0] + one
        numerator = keep(place[0] * (a - place[0]))
        b[0] = b[0] + number(2.0)
        d[0] = one / (numerator * d[0] + b[0])
        c[0] = b[0] + numerator / c[0]
        change = keep(c[0] * d[0])
        h[0] = h[0] * change
        return tirx.abs(change - one) <= number(epsilon)

    _iterate(step)
    return keep(a * h[0] * _factor(a, x))


def _uniform(a: Any, x: Any, sign: float) -> Any:
    """P (sign -1) or Q (sign 1) for x near a large a."""
    relative = keep((x - a) / a)
    # relative - log(1 + relative), which log1p would cancel in.
    r = keep(relative / (number(2.0) + relative))
    square = keep(r * r)
    odd = _powers(square, [1.0 / (2 * k + 3) for k in range(14)])
    distance = keep(r * relative - number(2.0) * r * square * odd)
    eta = keep(tirx.sqrt(tirx.max(number(2.0) * distance, number(0.0))))
    eta = keep(tirx.Select(relative < number(0.0), number(0.0) - eta, eta))
    inverse = keep(number(1.0) / a)
    total = number(0.0)
    for row in reversed(tables.TEMME):
        total = keep(total * inverse + _powers(eta, row))
    scale = number(1.0 / math.sqrt(2.0 * math.pi)) / tirx.sqrt(a)
    rest = scale * call("exp", number(0.0) - a * distance) * total
    main = number(0.5) * call("erfc", number(sign) * eta * tirx.sqrt(a * number(0.5)))
    return keep(main + number(sign) * rest)


def _incomplete(upper: bool, epsilon: float) -> Callable[[Any, Any], Any]:
    at_zero, beyond = (1.0, 0.0) if upper else (0.0, 1.0)

    def value(a: Any, x: Any) -> Any:
        zero = number(0.0)
        infinite_a = tirx.EQ(a, number(math.inf))
        infinite_x = tirx.EQ(x, number(math.inf))
        close = tirx.abs(x - a) <= number(_WIDTH) * a
        branches = [
            (tirx.Or(a < zero, x < zero), lambda: number(math.nan)),
            (tirx.EQ(a, zero), lambda: tirx.Select(x > zero, number(beyond), number(math.nan))),
            (tirx.EQ(x, zero), lambda: number(at_zero)),
            (tirx.And(infinite_a, infinite_x), lambda: number(math.nan)),
            # Whatever the other one is, NaN included.
            (infinite_a, lambda: number(at_zero)),
            (infinite_x, lambda: number(beyond)),
            (tirx.isnan(a + x), lambda: number(math.nan)),
            (
                tirx.And(a >= number(_LARGE), close),
                lambda: _uniform(a, x, 1.0 if upper else -1.0),
            ),
        ]
        low = tirx.Or(x <= number(1.1), x <= a)
        if not upper:
            return cases(
                [*branches, (low, lambda: _series(a, x, epsilon))],
                lambda: number(1.0) - _fraction(a, x, epsilon),
            )
        # Where P is near 1.
        edge = tirx.Select(x <= number(0.5), number(-0.4) / call("log", x), x * number(0.75))
        small = tirx.And(x <= number(1.1), a <= edge)
        return cases(
            [
                *branches,
                (small, lambda: _small_complement(a, x, epsilon)),
                (low, lambda: number(1.0) - _series(a, x, epsilon)),
            ],
            lambda: _fraction(a, x, epsilon),
        )

    return value


def _register(name: str, target: Any, upper: bool) -> None:
    def incomplete(self: Any, other: Any) -> Any:
        if "float" not in dtype(self):
            raise Unsupported("integers, as in eager")
        epsilon = _PRECISE if dtype(self) == "float64" else _COARSE
        return special(name, _incomplete(upper, epsilon), self, other)

    converts(target, promote=Promotion.DEFAULT)(incomplete)


_register("igamma", aten.igamma.default, False)
_register("igammac", aten.igammac.default, True)
