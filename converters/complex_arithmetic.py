"""Complex tensors: arithmetic, element by element and in products of matrices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from fx2relax.bounds import equal
from fx2relax.complexes import Complex, as_complex

from .common import (
    Promotion,
    Unsupported,
    const,
    converts,
    emit,
    op,
    shape,
    shape_expr,
    tirx,
)
from .elementwise import (
    copysign,
    elementwise,
    extern,
    is_nan,
    let,
    logical_not,
    not_equal,
    number,
    select,
)
from .linear_algebra import accumulated

aten = torch.ops.aten
_linear = functools.partial(
    converts, promote=Promotion.DEFAULT, promote_args=("self", "other"), complex_numbers=True
)
Body = Callable[[Any, Any, Any, Any], Any]


def _of_two(name: str, real: Body, imag: Body, a: Complex, b: Complex) -> Complex:
    """Both parts of ``a ? b``, each of ``(a.real, a.imag, b.real, b.imag)``."""
    parts = (*a.parts, *b.parts)
    return Complex(
        elementwise(f"{name}_real", real, *parts), elementwise(f"{name}_imag", imag, *parts)
    )


def _times(x: Any, y: Any) -> Any:
    """A product in which a constant 0, the imaginary part of what is real, keeps NaN."""
    for zero, other in ((x, y), (y, x)):
        if isinstance(zero, tirx.FloatImm) and zero.value == 0:
            if isinstance(other, tirx.FloatImm):
                return number(zero.value * other.value, zero)
            nothing = copysign(number(0.0, other), other)
            finite = tirx.abs(other) <= tirx.max_value(str(other.ty.dtype))
            return select(finite, nothing, number(math.nan, other))
    return x * y


def _product(a: Complex, b: Complex) -> Complex:
    return _of_two(
        "complex_multiply",
        lambda a, b, c, d: _times(a, c) - _times(b, d),
        lambda a, b, c, d: _times(a, d) + _times(b, c),
        a,
        b,
    )


def _each(function: Callable[[Any, Any], Any], a: Complex, b: Complex) -> Complex:
    """An elementwise operator on the real parts, and on the imaginary parts."""
    real, imag = emit(function(a.real, b.real)), emit(function(a.imag, b.imag))
    sizes, own = shape(real), shape(imag)
    if len(sizes) == len(own) and all(map(equal, sizes, own)):
        return Complex(real, imag)
    # Of what is real the imaginary part has no axes.
    return Complex(real, op.broadcast_to(imag, shape_expr(sizes)))


def _scaled(a: Complex, by: Any) -> Complex:
    """``a`` times a Python number."""
    if isinstance(by, complex):
        return _product(a, Complex(const(by.real, a.real), const(by.imag, a.real)))
    return a if by == 1 else a.map(lambda part: op.multiply(part, const(by, part)))


@_linear(aten.add.Tensor, aten.add.Scalar)
def add(self: Complex, other: Complex, alpha: Any = 1) -> Complex:
    """``self + alpha * other``."""
    other = _scaled(other, alpha)
    return _each(op.add, self, other)


@_linear(aten.sub.Tensor, aten.sub.Scalar)
def sub(self: Complex, other: Complex, alpha: Any = 1) -> Complex:
    """``self - alpha * other``."""
    other = _scaled(other, alpha)
    return _each(op.subtract, self, other)


@_linear(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(self: Complex, other: Complex, alpha: Any = 1) -> Complex:
    """``other - alpha * self``."""
    return sub(other, self, alpha)


@converts(aten.mul.Tensor, aten.mul.Scalar, promote=Promotion.DEFAULT, complex_numbers=True)
def mul(self: Complex, other: Complex) -> Complex:
    """The product, with an infinite or undefined part as it comes of the four products."""
    return _product(self, other)


@converts(
    aten.where.self,
    promote=Promotion.NO_OPMATH,
    promote_args=("self", "other"),
    complex_numbers=True,
)
def where(condition: Any, self: Complex, other: Complex) -> Complex:
    """Elements of the one or the other."""
    return _each(lambda a, b: op.where(condition, a, b), self, other)


def _quotient(which: int) -> Body:
    """One part of ``(a + bi) / (c + di)``, scaled by the larger part of the divisor."""

    def body(a: Any, b: Any, c: Any, d: Any) -> Any:
        def by(larger: Any, smaller: Any, x: Any, y: Any) -> Any:
            # (x + y * ratio) / (larger + smaller * ratio)
            one = number(1.0, larger)
            return let(
                smaller / larger,
                lambda ratio: (x + y * ratio) * (one / (larger + smaller * ratio)),
            )

        wide = by(c, d, a, b) if which == 0 else by(c, d, b, -a)
        tall = by(d, c, b, a) if which == 0 else by(d, c, -a, b)
        zero = number(0.0, c)
        nothing = tirx.And(tirx.EQ(c, zero), tirx.EQ(d, zero))
        infinite = a / tirx.abs(c) if which == 0 else b / tirx.abs(d)
        return select(nothing, infinite, select(tirx.abs(c) >= tirx.abs(d), wide, tall))

    return body


@converts(aten.div.Tensor, aten.div.Scalar, promote=Promotion.DEFAULT, complex_numbers=True)
def div(self: Complex, other: Complex) -> Complex:
    """The quotient by Smith's algorithm, as in eager."""
    # A tensor even of what is a number: TVM raises where it folds a division by the constant 0.
    divisor = Complex(*(op.full_like(other.real, p) if _is_0d(p) else p for p in other.parts))
    return _of_two("complex_divide", _quotient(0), _quotient(1), self, divisor)


def _is_0d(x: Any) -> bool:
    return not shape(x)


@converts(aten.reciprocal.default, promote=Promotion.DEFAULT, complex_numbers=True)
def reciprocal(self: Complex) -> Complex:
    """``1 / self``."""
    one = Complex(op.ones_like(emit(self.real)), op.zeros_like(emit(self.real)))
    return div(one, self)


@converts(aten.neg.default, aten._neg_view.default, complex_numbers=True)
def neg(self: Complex) -> Complex:
    """Both signs turned."""
    return self.map(op.negative)


@converts(aten.pow.Tensor_Scalar, complex_numbers=True)
def pow_scalar(self: Complex, exponent: Any) -> Complex:
    """The square and the cube; other powers are PyTorch's."""
    if exponent == 1:
        return self
    if exponent == 2:
        return _product(self, self)
    if exponent == 3:
        return _product(_product(self, self), self)
    raise Unsupported(f"a complex tensor to the power of {exponent}")


@converts(aten.exp.default, promote=Promotion.DEFAULT, complex_numbers=True)
def exp(self: Complex) -> Complex:
    """``exp(real)`` in the direction of the imaginary part."""
    length = emit(op.exp(self.real))
    return Complex(op.multiply(length, op.cos(self.imag)), op.multiply(length, op.sin(self.imag)))


@converts(aten.abs.default, promote=Promotion.COMPLEX_TO_FLOAT, complex_numbers=True)
def abs_(self: Complex) -> Any:
    """The length, without overflow on the way."""
    return elementwise("complex_abs", lambda x, y: extern("hypot", x, y), *self.parts)


@converts(aten.angle.default, promote=Promotion.COMPLEX_TO_FLOAT, complex_numbers=True)
def angle(self: Complex) -> Any:
    """The angle between the positive real axis and the number, from -pi to pi."""
    return elementwise("complex_angle", lambda x, y: extern("atan2", y, x), *self.parts)


@converts(aten.sgn.default, promote=Promotion.DEFAULT, complex_numbers=True)
def sgn(self: Complex) -> Complex:
    """The number of length 1 in the same direction; 0 of 0."""
    length = emit(abs_(self))

    def along(part: Any) -> Any:
        def body(x: Any, r: Any) -> Any:
            return select(tirx.EQ(r, number(0.0, r)), number(0.0, x), x / r)

        return elementwise("complex_sgn", body, part, length)

    return self.map(along)


@converts(
    aten._conj.default,
    aten.conj.default,
    aten.conj_physical.default,
    aten._conj_physical.default,
    aten._conj_copy.default,
    torch.ops.prims.conj_physical.default,
    complex_numbers=True,
)
def conj(self: Complex | complex) -> Complex:
    """The imaginary part's sign turned; a Python number is a tensor of doubles."""
    whole: Complex = as_complex(self, "float64") if isinstance(self, complex) else self
    return whole.conjugate()


@converts(
    aten.resolve_conj.default,
    aten.resolve_neg.default,
    complex_numbers=True,
)
def resolved(self: Complex) -> Complex:
    """The value itself: no tensor here stands for its conjugate."""
    return self


@converts(aten.eq.Tensor, aten.eq.Scalar, promote=Promotion.ALWAYS_BOOL, complex_numbers=True)
def eq(self: Complex, other: Complex) -> Any:
    """Whether both parts are equal."""
    return op.logical_and(op.equal(self.real, other.real), op.equal(self.imag, other.imag))


@converts(aten.ne.Tensor, aten.ne.Scalar, promote=Promotion.ALWAYS_BOOL, complex_numbers=True)
def ne(self: Complex, other: Complex) -> Any:
    """Whether a part differs."""
    return op.logical_or(not_equal(self.real, other.real), not_equal(self.imag, other.imag))


@converts(aten.isnan.default, complex_numbers=True)
def isnan(self: Complex) -> Any:
    """Whether a part is NaN."""
    return op.logical_or(is_nan(self.real), is_nan(self.imag))


@converts(aten.isinf.default, complex_numbers=True)
def isinf(self: Complex) -> Any:
    """Whether a part is infinite."""
    return op.logical_or(op.isinf(self.real), op.isinf(self.imag))


@converts(aten.isfinite.default, torch.ops.prims.isfinite.default, complex_numbers=True)
def isfinite(self: Complex) -> Any:
    """Whether both parts are finite."""
    return op.logical_and(op.isfinite(self.real), op.isfinite(self.imag))


@converts(aten.logical_not.default, complex_numbers=True)
def logical_not_(self: Complex) -> Any:
    """Whether both parts are 0."""
    zero = [const(0.0, part) for part in self.parts]
    nonzero = [not_equal(part, z) for part, z in zip(self.parts, zero, strict=True)]
    return logical_not(op.logical_or(*nonzero))


def _matrices(product: Callable[[Any, Any], Any], a: Complex, b: Complex) -> Complex:
    """Four products of the parts."""
    return Complex(
        op.subtract(product(a.real, b.real), product(a.imag, b.imag)),
        op.add(product(a.real, b.imag), product(a.imag, b.real)),
    )


@converts(
    aten.mm.default,
    aten.bmm.default,
    aten.mv.default,
    aten.matmul.default,
    aten.dot.default,
    complex_numbers=True,
)
def matmul(self: Complex, other: Complex) -> Complex:
    """A product of matrices or vectors."""
    return _matrices(accumulated, self, other)


@converts(aten.vdot.default, complex_numbers=True)
def vdot(self: Complex, other: Complex) -> Complex:
    """The scalar product of the conjugate."""
    return _matrices(accumulated, self.conjugate(), other)


@converts(aten.addmm.default, aten.baddbmm.default, complex_numbers=True)
def addmm(self: Complex, a: Complex, b: Complex, *, beta: Any = 1, alpha: Any = 1) -> Complex:
    """``beta * self + alpha * (a @ b)``; what `self` holds does not matter where `beta` is 0."""
    whole = _scaled(_matrices(accumulated, a, b), alpha)
    return whole if beta == 0 else add(_scaled(self, beta), whole)
