"""What special functions are written with: float64 numbers inside a kernel of statements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .common import Promotion, Unsupported, cast, converts, dtype, tirx
from .opaque import T, local
from .statements import each, keep

__all__ = ["call", "cases", "expansion", "number", "ratio", "register", "special"]

Value = Callable[[], Any]


def number(value: float) -> Any:
    """A constant."""
    return tirx.const(value, "float64")


def call(name: str, *args: Any) -> Any:
    """A function of the C library."""
    return tirx.call_pure_extern("float64", name, *args)


def cases(branches: Sequence[tuple[Any, Value]], otherwise: Value) -> Any:
    """The value that stands beside the first condition to hold; no other one is computed."""
    result = local("float64")

    def choose(rest: Sequence[tuple[Any, Value]]) -> None:
        if not rest:
            result[0] = otherwise()
            return
        condition, value = rest[0]
        with T.If(condition):
            with T.Then():
                result[0] = value()
            with T.Else():
                choose(rest[1:])

    choose(branches)
    return result[0]


def expansion(x: Any, coefficients: Sequence[float]) -> Any:
    """A sum of Chebyshev's polynomials at x, from -1 to 1, by Clenshaw's recurrence."""
    double = keep(x + x)
    older, newer = number(0.0), number(0.0)
    for c in reversed(coefficients[1:]):
        older, newer = newer, keep(double * newer - older + number(c))
    return keep(x * newer - older + number(coefficients[0]))


def ratio(x: Any, numerator: Sequence[float], denominator: Sequence[float]) -> Any:
    """A quotient of two polynomials, their highest powers first."""
    return keep(_horner(x, numerator) / _horner(x, denominator))


def _horner(x: Any, coefficients: Sequence[float]) -> Any:
    value = number(coefficients[0])
    for c in coefficients[1:]:
        value = keep(value * x + number(c))
    return value


def special(name: str, function: Callable[..., Any], *operands: Any) -> Any:
    """A tensor of what a function of float64 numbers gives, rounded once; broadcast."""
    kind = dtype(operands[0])
    wide = [cast(x, "float64") for x in operands]
    return cast(each(name, lambda *v: [function(*v)], ["float64"], *wide)[0], kind)


def register(name: str, function: Callable[[Any], Any], *targets: Any) -> None:
    """Make a function of a float64 number the converter of operators that take no half."""

    def converter(self: Any) -> Any:
        if dtype(self) not in ("float32", "float64"):
            raise Unsupported("half precision, as in eager")
        return special(name, function, self)

    converts(*targets, promote=Promotion.INT_TO_FLOAT)(converter)
