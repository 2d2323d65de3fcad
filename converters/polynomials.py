"""Orthogonal polynomials: by trigonometry where that is exact enough, else by their recurrences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .common import Promotion, Unsupported, converts, dtype, tirx
from .opaque import T, local, wide
from .statements import each, keep

aten = torch.ops.aten


@dataclass(frozen=True)
class Recurrence:
    """A family of polynomials; all take the argument and TIR numbers of its dtype.

    Attributes:
        first: the polynomial of degree 1; that of degree 0 is 1.
        step: from the argument, two neighbours (the higher degree first) and the index of the
            step to the next one.
        start: the index of the first step.
        growth: how much the index grows by; it ends before the degree times this.
        closed: from argument and degree, where the value is known without steps: conditions, each
            with the value, or a function that gives it.
        limit: per dtype the degree beyond which there is NaN.
    """

    first: Callable[[Any], Any]
    step: Callable[[Any, Any, Any, Any], Any]
    start: int = 1
    growth: int = 1
    closed: Callable[[Any, Any], list[tuple[Any, Any]]] = lambda x, n: []
    limit: tuple[tuple[str, int], ...] = ()


def _number(value: float, like: Any) -> Any:
    return tirx.const(value, str(like.ty.dtype))


def _as(value: Any, like: Any) -> Any:
    return tirx.Cast(str(like.ty.dtype), value)


def _math(name: str, x: Any) -> Any:
    """A function of the C library, in the argument's dtype."""
    kind = str(x.ty.dtype)
    return tirx.call_pure_extern(kind, f"{name}f" if kind == "float32" else name, x)


def _degree(n: Any) -> Any:
    """A float truncated to an integer; below zero what lies outside of int64, and NaN."""
    limit = _number(2.0**63, n)
    inside = tirx.And(n > _number(-1.0, n), n < limit)
    return keep(tirx.Select(inside, tirx.Cast("int64", n), wide(-1)))


def _evaluate(family: Recurrence, x: Any, degree: Any) -> Any:
    """The polynomial of a degree; 0 of a negative one."""
    n = _degree(degree)
    one = _number(1.0, x)
    result, before, index = local(str(x.ty.dtype)), local(str(x.ty.dtype)), local("int64")
    result[0] = one
    done = keep(n <= wide(0))
    with T.If(n < wide(0)), T.Then():
        result[0] = _number(0.0, x)
    for kind, limit in family.limit:
        if kind == str(x.ty.dtype):
            with T.If(n > wide(limit)), T.Then():
                result[0] = _number(float("nan"), x)
            done = keep(tirx.Or(done, n > wide(limit)))
    for condition, value in family.closed(x, n):
        with T.If(tirx.And(tirx.Not(done), condition)), T.Then():
            result[0] = value() if callable(value) else value
        done = keep(tirx.Or(done, condition))
    with T.If(tirx.Not(done)), T.Then():
        before[0] = one
        result[0] = family.first(x)
        index[0] = wide(family.start)
        end = n * wide(family.growth)
        # Beyond a NaN there is nothing else.
        with T.While(tirx.And(index[0] < end, tirx.Not(tirx.isnan(result[0])))):
            following = keep(family.step(x, result[0], before[0], _as(index[0], x)))
            before[0] = result[0]
            result[0] = following
            index[0] = index[0] + wide(family.growth)
    return result[0]


# -- Chebyshev's polynomials of the four kinds -----------------------------------------------------


def _sign(n: Any, x: Any) -> Any:
    even = tirx.EQ(n & wide(1), wide(0))
    return tirx.Select(even, _number(1.0, x), _number(-1.0, x))


def _one(x: Any, n: Any) -> Any:
    return _number(1.0, x)


def _more(x: Any, n: Any) -> Any:
    return _as(n + wide(1), x)


def _odd(x: Any, n: Any) -> Any:
    return _as(n + n + wide(1), x)


def _first_kind(x: Any, n: Any) -> Any:
    return _math("cos", _as(n, x) * _math("acos", x))


def _second_kind(x: Any, n: Any) -> Any:
    angle = keep(_math("acos", x))
    return _math("sin", _as(n + wide(1), x) * angle) / _math("sin", angle)


def _third_kind(x: Any, n: Any) -> Any:
    """At -1 in all but rounding it is the value there."""
    angle = keep(_math("acos", x))
    half = keep(angle / _number(2.0, x))
    value = _math("cos", (_as(n, x) + _number(0.5, x)) * angle) / _math("cos", half)
    edge = tirx.EQ(_math("sin", half), _number(1.0, x))
    return tirx.Select(edge, _sign(n, x) * _odd(x, n), value)


def _fourth_kind(x: Any, n: Any) -> Any:
    """At 1 in all but rounding it is the value there."""
    angle = keep(_math("acos", x))
    half = keep(angle / _number(2.0, x))
    value = _math("sin", (_as(n, x) + _number(0.5, x)) * angle) / _math("sin", half)
    return tirx.Select(tirx.EQ(_math("cos", half), _number(1.0, x)), _odd(x, n), value)


def _chebyshev(
    shift: int | None,
    above: int,
    formula: Callable[[Any, Any], Any],
    at_one: Callable[[Any, Any], Any],
    at_minus_one: Callable[[Any, Any], Any],
) -> Recurrence:
    """One of the four kinds.

    Args:
        shift: the polynomial of degree 1 is twice the argument plus this; None for the argument.
        above: the degree beyond which the formula is used between -1 and 1.
        formula: the polynomial in terms of the angle.
        at_one: the value at 1.
        at_minus_one: the value at -1, but for the sign.
    """

    def closed(x: Any, n: Any) -> list[tuple[Any, Any]]:
        one = _number(1.0, x)
        minus = _number(-1.0, x)
        inside = keep(tirx.And(n > wide(above), tirx.abs(x) < one))
        return [
            (tirx.EQ(x, one), at_one(x, n)),
            (tirx.EQ(x, minus), _sign(n, x) * at_minus_one(x, n)),
            (inside, lambda: formula(x, n)),
        ]

    def first(x: Any) -> Any:
        return x if shift is None else x + x + _number(float(shift), x)

    return Recurrence(first, lambda x, q, p, _: (x + x) * q - p, closed=closed)


_KINDS = {
    "t": (None, 6, _first_kind, _one, _one),
    "u": (0, 8, _second_kind, _more, _more),
    "v": (-1, 8, _third_kind, _one, _odd),
    "w": (1, 8, _fourth_kind, _odd, _one),
}

# -- the others ------------------------------------------------------------------------------------


def _laguerre_step(x: Any, q: Any, p: Any, k: Any) -> Any:
    one = _number(1.0, x)
    return ((k + k + (one - x)) * q - k * p) / (k + one)


def _legendre_step(x: Any, q: Any, p: Any, k: Any) -> Any:
    one = _number(1.0, x)
    # Rounded by itself, as eager's is: of high degrees near 1, a fused product is seen.
    return (keep((k + k + one) * x * q) - k * p) / (k + one)


def _legendre_ends(x: Any, n: Any) -> list[tuple[Any, Any]]:
    one = _number(1.0, x)
    return [(tirx.EQ(x, one), one), (tirx.EQ(x, _number(-1.0, x)), _sign(n, x))]


_LIMIT = (("float32", 128), ("float64", 512))
_FAMILIES = {
    "hermite_polynomial_h": Recurrence(
        lambda x: x + x, lambda x, q, p, k: (x + x) * q - k * p, 2, 2, limit=_LIMIT
    ),
    "hermite_polynomial_he": Recurrence(
        lambda x: x, lambda x, q, p, k: x * q - k * p, limit=_LIMIT
    ),
    "laguerre_polynomial_l": Recurrence(
        lambda x: _number(1.0, x) - x,
        _laguerre_step,
        closed=lambda x, n: [(tirx.EQ(x, _number(0.0, x)), _number(1.0, x))],
    ),
    "legendre_polynomial_p": Recurrence(lambda x: x, _legendre_step, closed=_legendre_ends),
}


def _register(name: str, family: Recurrence, shifted: bool = False) -> None:
    packet = getattr(aten, f"special_{name}")

    def body(x: Any, n: Any) -> list[Any]:
        argument = keep(x + x - _number(1.0, x)) if shifted else x
        return [_evaluate(family, argument, n)]

    def polynomial(x: Any, n: Any) -> Any:
        kind = dtype(x)
        if kind not in ("float32", "float64"):
            raise Unsupported("half precision, as in eager")
        return each(name, body, [kind], x, n)[0]

    targets = (packet.default, packet.x_scalar, packet.n_scalar)
    converts(*targets, promote=Promotion.INT_TO_FLOAT)(polynomial)


for _name, _family in _FAMILIES.items():
    _register(_name, _family)
for _name, (_shift, _above, _formula, _at_one, _at_minus_one) in _KINDS.items():
    _family = _chebyshev(_shift, _above, _formula, _at_one, _at_minus_one)
    _register(f"chebyshev_polynomial_{_name}", _family)
    _family = _chebyshev(_shift, 6, _formula, _at_one, _at_minus_one)
    _register(f"shifted_chebyshev_polynomial_{_name}", _family, shifted=True)
