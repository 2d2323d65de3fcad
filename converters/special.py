"""Special functions, computed in double precision and rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import special_tables as tables
from .common import Promotion, Unsupported, cast, converts, dtype, is_float, op, tirx
from .elementwise import elementwise, extern
from .opaque import T, local
from .statements import each, keep

aten = torch.ops.aten
prims = torch.ops.prims

NAN, INF = math.nan, math.inf


def f64(value: float) -> Any:
    """A float64 constant."""
    return tirx.const(value, "float64")


def _extern(name: str, *args: Any) -> Any:
    return tirx.call_pure_extern("float64", name, *args)


def _choose(condition: Any, yes: Any, no: Any) -> Any:
    return tirx.Select(condition, _number(yes), _number(no))


def _number(value: Any) -> Any:
    return f64(value) if isinstance(value, (int, float)) else value


def _polynomial(x: Any, coefficients: Sequence[float]) -> Any:
    result = f64(coefficients[0])
    for c in coefficients[1:]:
        result = result * x + f64(c)
    return keep(result)


def _chebyshev(x: Any, coefficients: Sequence[float]) -> Any:
    before, last = f64(0.0), f64(coefficients[0])
    older = before
    for c in coefficients[1:]:
        older, before, last = before, last, keep(x * last - before + f64(c))
    return keep((last - older) * f64(0.5))


# -- modified Bessel functions -------------------------------------------------------------------


def _bessel(x: Any, near: Sequence[float], far: Sequence[float]) -> Any:
    """``exp(-|x|) I(|x|)`` from its two expansions; the first is divided by |x| for order 1."""
    size = keep(tirx.abs(x))
    close = _chebyshev(keep(size * f64(0.5) - f64(2.0)), near)
    distant = _chebyshev(keep(f64(32.0) / size - f64(2.0)), far)
    inside = size <= f64(8.0)
    return size, inside, close, keep(distant / tirx.sqrt(size))


def i0e(x: Any) -> Any:
    """The scaled function of order 0."""
    _, inside, close, distant = _bessel(x, tables.I0_NEAR, tables.I0_FAR)
    return keep(_choose(inside, close, distant))


def i1e(x: Any) -> Any:
    """The scaled function of order 1, which is odd."""
    size, inside, close, distant = _bessel(x, tables.I1_NEAR, tables.I1_FAR)
    value = keep(_choose(inside, close * size, distant))
    return keep(_choose(x < f64(0.0), f64(0.0) - value, value))


def _unscaled(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: keep(function(x) * _extern("exp", tirx.abs(x)))


# -- the error function's inverse, the normal distribution's quantiles ---------------------------


def erfinv(y: Any) -> Any:
    """Infinite at -1 and 1, NaN beyond; a rational guess and two of Newton's steps."""
    size, square = keep(tirx.abs(y)), keep(y * y)
    middle = y * _polynomial(square, tables.ERFINV_A) / _polynomial(square, tables.ERFINV_B)
    z = keep(tirx.sqrt(f64(0.0) - _extern("log", (f64(1.0) - size) * f64(0.5))))
    tail = tirx.copysign(_polynomial(z, tables.ERFINV_C), y) / _polynomial(z, tables.ERFINV_D)
    x = keep(_choose(size <= f64(0.7), middle, tail))
    for _ in range(2):
        slope = f64(2.0 / math.sqrt(math.pi)) * _extern("exp", f64(0.0) - x * x)
        x = keep(x - (_extern("erf", x) - y) / slope)
    edge = _choose(tirx.EQ(size, f64(1.0)), tirx.copysign(f64(INF), y), x)
    return keep(_choose(size > f64(1.0), NAN, edge))


def ndtri(p: Any) -> Any:
    """The quantile of a probability: infinite at 0 and 1, NaN beyond."""
    small = 0.13533528323661269189  # exp(-2)
    upper = keep(p > f64(1.0 - small))
    y = keep(_choose(upper, f64(1.0) - p, p))
    centred = keep(y - f64(0.5))
    square = keep(centred * centred)
    ratio = _polynomial(square, tables.NDTRI_P0) / _polynomial(square, tables.NDTRI_Q0)
    middle = keep((centred + centred * (square * ratio)) * f64(2.50662827463100050242))
    x = keep(tirx.sqrt(f64(-2.0) * _extern("log", y)))
    z = keep(f64(1.0) / x)
    near = z * _polynomial(z, tables.NDTRI_P1) / _polynomial(z, tables.NDTRI_Q1)
    far = z * _polynomial(z, tables.NDTRI_P2) / _polynomial(z, tables.NDTRI_Q2)
    tail = keep((x - _extern("log", x) / x) - _choose(x < f64(8.0), near, far))
    signed = _choose(upper, tail, f64(0.0) - tail)
    inner = keep(_choose(y > f64(small), middle, signed))
    ends = _choose(tirx.EQ(p, f64(0.0)), -INF, _choose(tirx.EQ(p, f64(1.0)), INF, inner))
    return keep(_choose(tirx.Or(p < f64(0.0), p > f64(1.0)), NAN, ends))


# -- derivatives of the gamma function's logarithm -----------------------------------------------


def digamma(x: Any) -> Any:
    """-inf at 0 and inf at -0, NaN at negative integers; reflected below zero."""
    negative = keep(x < f64(0.0))
    v = keep(_choose(negative, f64(1.0) - x, x))
    total = keep(f64(0.0))
    for _ in range(10):
        low = keep(v < f64(10.0))
        total = keep(_choose(low, total - f64(1.0) / v, total))
        v = keep(_choose(low, v + f64(1.0), v))
    z = keep(f64(1.0) / (v * v))
    series = _choose(v < f64(1e17), z * _polynomial(z, tables.DIGAMMA), 0.0)
    value = keep(total + _extern("log", v) - f64(0.5) / v - series)
    fraction = keep(x - tirx.trunc(x))
    reflected = value - f64(math.pi) / _extern("tan", f64(math.pi) * fraction)
    value = _choose(negative, _choose(tirx.EQ(fraction, f64(0.0)), NAN, reflected), value)
    pole = tirx.copysign(f64(INF), f64(-1.0) * x)
    return keep(_choose(tirx.EQ(x, f64(0.0)), pole, value))


def trigamma(x: Any, kind: str) -> Any:
    """Reflected below a half; at its poles as large as the rounding of pi in the dtype makes it."""
    low = keep(x < f64(0.5))
    if kind == "float64":
        sine = keep(_extern("sin", f64(math.pi) * x))
    else:
        angle = keep(tirx.const(math.pi, "float32") * tirx.Cast("float32", x))
        sine = keep(tirx.Cast("float64", tirx.call_pure_extern("float32", "sinf", angle)))
    v = keep(_choose(low, f64(1.0) - x, x))
    total = keep(_choose(low, f64(-(math.pi**2)) / (sine * sine), 0.0))
    for _ in range(6):
        total = keep(total + f64(1.0) / (v * v))
        v = keep(v + f64(1.0))
    z = keep(f64(1.0) / (v * v))
    inner = f64(1 / 30) - z * f64(1 / 42)
    series = f64(1.0) + f64(0.5) / v + z * (f64(1 / 6) - z * inner)
    value = keep(total + series / v)
    return keep(_choose(low, f64(0.0) - value, value))


def zeta(x: Any, q: Any) -> Any:
    """Hurwitz's: the sum of ``(q + k) ** -x``, by Euler and Maclaurin."""
    power = keep(f64(0.0) - x)
    total, a, b = local("float64"), local("float64"), local("float64")
    count = local("int32")
    total[0], a[0], b[0], count[0] = _extern("pow", q, power), q, f64(0.0), tirx.const(0, "int32")
    whole, pole = keep(tirx.EQ(x, tirx.floor(x))), keep(tirx.EQ(q, tirx.floor(q)))
    # Such a q may be so far below zero that the terms would never end.
    outside = tirx.And(q <= f64(0.0), tirx.Or(pole, tirx.Not(whole)))
    undefined = keep(tirx.Or(x <= f64(1.0), outside))
    least = f64(1.11022302462515654042e-16)

    def settled() -> Any:
        """Whether the last term is too small to count."""
        tiny = tirx.And(f64(0.0) - least * total[0] < b[0], b[0] < least * total[0])
        return tirx.And(count[0] > tirx.const(0, "int32"), tiny)

    more = tirx.Or(count[0] < tirx.const(9, "int32"), a[0] <= f64(9.0))
    with T.While(tirx.And(more, tirx.Not(tirx.Or(undefined, settled())))):
        count[0] = count[0] + tirx.const(1, "int32")
        a[0] = a[0] + f64(1.0)
        b[0] = _extern("pow", a[0], power)
        total[0] = total[0] + b[0]
    done, w, last = keep(settled()), keep(a[0]), keep(b[0])
    value = keep(total[0] + last * w / (x - f64(1.0)) - f64(0.5) * last)
    factor = keep(f64(1.0))
    for k, divisor in enumerate(tables.ZETA):
        factor = keep(factor * (x + f64(2.0 * k)))
        last = keep(last / w)
        value = keep(value + factor * last / f64(divisor))
        factor = keep(factor * (x + f64(2.0 * k + 1)))
        last = keep(last / w)
    value = keep(_choose(done, total[0], value))
    below = _choose(pole, INF, _choose(whole, value, NAN))
    value = _choose(q <= f64(0.0), below, value)
    return keep(_choose(tirx.EQ(x, f64(1.0)), INF, _choose(x < f64(1.0), NAN, value)))


# -- registration --------------------------------------------------------------------------------


def _double(name: str, function: Callable[..., Any], *operands: Any) -> Any:
    kind = dtype(operands[0])
    wide = [cast(x, "float64") for x in operands]
    return cast(each(name, lambda *v: [function(*v)], ["float64"], *wide)[0], kind)


def _register(name: str, function: Callable[[Any], Any], *targets: Any) -> None:
    def special(self: Any) -> Any:
        return _double(name, function, self)

    converts(*targets, promote=Promotion.INT_TO_FLOAT)(special)


_register("i0", _unscaled(i0e), aten.i0.default, prims.bessel_i0.default)
_register("i0e", i0e, aten.special_i0e.default, prims.bessel_i0e.default)
_register("i1", _unscaled(i1e), aten.special_i1.default, prims.bessel_i1.default)
_register("i1e", i1e, aten.special_i1e.default, prims.bessel_i1e.default)
_register("erfinv", erfinv, aten.erfinv.default, prims.erf_inv.default)
_register("ndtri", ndtri, aten.special_ndtri.default, prims.ndtri.default)
_register("digamma", digamma, aten.digamma.default, prims.digamma.default)


@converts(aten.special_zeta.default, prims.zeta.default, promote=Promotion.INT_TO_FLOAT)
def special_zeta(self: Any, other: Any) -> Any:
    """Infinite for `self` of 1 and at `other`'s poles, NaN below 1."""
    return _double("zeta", zeta, self, other)


@converts(aten.polygamma.default, promote=Promotion.INT_TO_FLOAT, promote_args=("self",))
def polygamma(n: int, self: Any) -> Any:
    """The n-th derivative of `digamma`; beyond the first by the zeta function."""
    if n == 0:
        return _double("digamma", digamma, self)
    if n == 1:
        kind = dtype(self)
        return _double("trigamma", lambda x: trigamma(x, kind), self)
    sign = 1.0 if n % 2 else -1.0
    factor = sign * math.factorial(n) if n < 170 else sign * INF

    def body(x: Any) -> Any:
        return f64(factor) * zeta(f64(n + 1.0), x)

    return _double("polygamma", body, self)


@converts(aten.frexp.Tensor, prims.frexp.default)
def frexp(self: Any) -> Any:
    """A mantissa from a half to one and a power of two; 0, NaN and infinities have power 0."""
    exponent_bits, place = 0x7FF, tirx.const(52, "int64")

    def body(x: Any) -> list[Any]:
        tiny = keep(tirx.abs(x) < f64(2.0**-1022))
        bits = keep(tirx.reinterpret("int64", _choose(tiny, x * f64(2.0**54), x)))
        power = keep((bits >> place) & tirx.const(exponent_bits, "int64"))
        kept = bits & tirx.const(~(exponent_bits << 52), "int64")
        mantissa = tirx.reinterpret("float64", kept | tirx.const(1022 << 52, "int64"))
        lifted = tirx.Select(tiny, tirx.const(54, "int64"), tirx.const(0, "int64"))
        finite = tirx.Cast("int32", power - tirx.const(1022, "int64") - lifted)
        special = tirx.Or(tirx.EQ(x, f64(0.0)), power >= tirx.const(exponent_bits, "int64"))
        return [_choose(special, x, mantissa), tirx.Select(special, tirx.const(0, "int32"), finite)]

    kind = dtype(self)
    mantissa, exponent = each("frexp", body, ["float64", "int32"], cast(self, "float64"))
    return cast(mantissa, kind), exponent


@converts(aten.ldexp.Tensor)
def ldexp(self: Any, other: Any) -> Any:
    """``self * 2**other`` by whole numbers, whatever the power alone would overflow to."""
    if not is_float(self) or is_float(other):
        raise Unsupported("powers or factors of other kinds")
    kind = dtype(self)
    power = cast(op.clip(cast(other, "int64"), -5000, 5000), "int32")
    factor = cast(self, "float64" if kind == "float64" else "float32")
    return cast(elementwise("ldexp", lambda x, n: extern("ldexp", x, n), factor, power), kind)


@converts(aten.gcd.default, prims.gcd.default, promote=Promotion.DEFAULT)
def gcd(self: Any, other: Any) -> Any:
    """Euclid's, of the magnitudes; of zeros it is 0."""
    kind = dtype(self)
    zero = tirx.const(0, kind)

    def body(x: Any, y: Any) -> list[Any]:
        a, b, rest = local(kind), local(kind), local(kind)
        a[0] = x if kind.startswith("u") else tirx.Select(x < zero, zero - x, x)
        b[0] = y if kind.startswith("u") else tirx.Select(y < zero, zero - y, y)
        with T.While(b[0] != zero):
            rest[0] = tirx.truncmod(a[0], b[0])
            a[0] = b[0]
            b[0] = rest[0]
        return [a[0]]

    return each("gcd", body, [kind], self, other)[0]
