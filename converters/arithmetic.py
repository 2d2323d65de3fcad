"""Sums, differences, products, quotients and powers of elements, with PyTorch's promotion."""

from __future__ import annotations

from typing import Any

import torch
import torch._inductor.inductor_prims  # registers prims.fma

from fx2relax.compat import const_number, is_prim_expr

from .common import (
    Expr,
    Promotion,
    cast,
    compute_dtype,
    const,
    converts,
    dtype,
    is_float,
    op,
    product,
    reshape,
    shape,
    shape_expr,
    tirx,
)
from .division import int_quotient
from .elementwise import copysign, elementwise, extern, let, number, select
from .indices import broadcast_sizes
from .opaque import T, local, loops, opaque

aten = torch.ops.aten
prims = torch.ops.prims


@converts(aten.add.Tensor, promote=Promotion.DEFAULT, promote_args=("self", "other"))
def add(self: Any, other: Any, *, alpha: Any = 1) -> Any:
    """``self + alpha * other``; on booleans the logical or."""
    if dtype(self) == "bool":
        return op.logical_or(self, _scaled(other, alpha))
    return op.add(self, _scaled(other, alpha))


@converts(aten.add.Scalar, promote=Promotion.DEFAULT, promote_args=("self", "other"))
def add_scalar(self: Any, other: Any, alpha: Any = 1) -> Any:
    """`add` of a number."""
    return add(self, other, alpha=alpha)


@converts(
    aten.sub.Tensor,
    promote=Promotion.DEFAULT,
    promote_args=("self", "other"),
)
def sub(self: Any, other: Any, *, alpha: Any = 1) -> Any:
    """``self - alpha * other``."""
    return op.subtract(self, _scaled(other, alpha))


@converts(
    aten.sub.Scalar,
    promote=Promotion.DEFAULT,
    promote_args=("self", "other"),
)
def sub_scalar(self: Any, other: Any, alpha: Any = 1) -> Any:
    """`sub` of a number."""
    return sub(self, other, alpha=alpha)


@converts(
    aten.rsub.Tensor,
    promote=Promotion.DEFAULT,
    promote_args=("self", "other"),
)
def rsub(self: Any, other: Any, *, alpha: Any = 1) -> Any:
    """``other - alpha * self``."""
    return sub(other, self, alpha=alpha)


@converts(
    aten.rsub.Scalar,
    promote=Promotion.DEFAULT,
    promote_args=("self", "other"),
)
def rsub_scalar(self: Any, other: Any, alpha: Any = 1) -> Any:
    """`rsub` from a number."""
    return sub(other, self, alpha=alpha)


def _scaled(x: Any, alpha: Any) -> Any:
    if dtype(x) == "bool":
        return x if alpha else const(False, x)
    if isinstance(alpha, Expr) or is_prim_expr(alpha):
        return op.multiply(x, cast(alpha, dtype(x)))
    return x if alpha == 1 else op.multiply(x, const(alpha, x))


@converts(aten.mul.Tensor, aten.mul.Scalar, promote=Promotion.DEFAULT, exact_scalars=True)
def mul(self: Any, other: Any) -> Any:
    """A product; on booleans the logical and."""
    if dtype(self) == "bool":
        return op.logical_and(self, other)
    return op.multiply(self, other)


@converts(aten.div.Tensor, aten.div.Scalar, promote=Promotion.INT_TO_FLOAT, exact_scalars=True)
def div(self: Any, other: Any) -> Any:
    """A quotient of floats; by zero infinite or NaN."""
    divisor = const_number(other)
    if divisor == 0:
        # TVM refuses to divide by a literal zero; x * inf is x / 0 for every x.
        infinite = float("inf") if str(divisor)[0] != "-" else float("-inf")
        return op.multiply(self, const(infinite, self))
    return op.divide(self, other)


@converts(prims.div.default, promote=Promotion.DEFAULT)
def prims_div(self: Any, other: Any) -> Any:
    """A quotient of floats, or of integers rounded towards zero."""
    return div(self, other) if is_float(self) else int_quotient(self, other, tirx.truncdiv)


@converts(aten.reciprocal.default, prims.reciprocal.default, promote=Promotion.INT_TO_FLOAT)
def reciprocal(self: Any) -> Any:
    """``1 / self``."""
    return op.divide(const(1.0, self), self)


@converts(
    aten.pow.Tensor_Tensor, aten.pow.Scalar, prims.pow.default, promote=Promotion.BOOL_TO_LONG
)
def power(self: Any, exponent: Any) -> Any:
    """Integers to a negative power give 0 but for the bases 1 and -1."""
    if is_float(self) and const_number(self) == 2:
        return elementwise("exp2", tirx.exp2, exponent)
    if is_float(self):
        return op.power(self, exponent)
    return _int_power(self, exponent)


# NO_OPMATH, since eager's float16 has no such forms: its -inf ** 0.5 is inf, others' is NaN.
@converts(aten.pow.Tensor_Scalar, promote=Promotion.NO_OPMATH)
def power_scalar(self: Any, exponent: Any) -> Any:
    """Eager has forms of its own for half, whole and negative exponents, and so have we."""
    known = const_number(exponent)
    if dtype(self) == "bool":
        return power_scalar(cast(self, "int64"), cast(exponent, "int64"))
    roots = dtype(self) != "float16"
    if dtype(self) in ("float16", "bfloat16"):
        self, exponent = cast(self, "float32"), cast(exponent, "float32")
    if known == 0:
        return op.ones_like(self)
    if known == 1:
        return self
    if known == 2:
        return op.multiply(self, self)
    if known == 3:
        return op.multiply(op.multiply(self, self), self)
    if not is_float(self):
        return _int_power(self, exponent)
    if known == 0.5 and roots:
        return op.sqrt(self)
    if known == -0.5 and roots:
        return op.rsqrt(self)
    if known == -1 and roots:
        return op.divide(const(1.0, self), self)
    if known == -2:
        return op.divide(const(1.0, self), op.multiply(self, self))
    return elementwise("power", lambda x, y: extern("pow", x, y), self, exponent)


def _int_power(base: Any, exponent: Any) -> Any:
    """Repeated squaring; a negative exponent leaves 0 of all but 1 and -1."""
    known = const_number(exponent)
    if known is not None:
        return elementwise("int_power", lambda x: _known_power(x, int(known)), base)
    sizes = broadcast_sizes([shape(base), shape(exponent)])
    operands = [op.broadcast_to(v, shape_expr(sizes)) for v in (base, exponent)]
    count, name = product(sizes), dtype(base)

    def square_and_multiply(ins: Any, outs: Any, numbers: Any) -> None:
        one, two = tirx.const(1, name), tirx.const(2, name)
        with loops([numbers[0]], parallel=0) as (i,):
            square, left = local(name), local(name)
            square[0], left[0], outs[0][i] = ins[0][i], ins[1][i], one
            if not name.startswith("uint"):
                with T.If(left[0] < tirx.const(0, name)), T.Then():
                    left[0] = tirx.truncmod(left[0], two)
                    with T.If(tirx.all(square[0] != one, square[0] != -one)), T.Then():
                        square[0], left[0] = tirx.const(0, name), -one
                    left[0] = -left[0]
            with T.While(left[0] > tirx.const(0, name)):
                with T.If(tirx.truncmod(left[0], two) == one), T.Then():
                    outs[0][i] = outs[0][i] * square[0]
                square[0] = square[0] * square[0]
                left[0] = left[0] >> one

    return reshape(
        opaque("int_power", square_and_multiply, operands, lambda n: [(n[0], name)], [count]), sizes
    )


def _known_power(base: Any, exponent: int) -> Any:
    """A power with the exponent known: one product for each bit of it, and for each one-bit."""
    one = number(1, base)
    if exponent < 0:
        sign = one if exponent % 2 == 0 else number(-1, base)
        negative = select(tirx.EQ(base, number(-1, base)), sign, number(0, base))
        return select(tirx.EQ(base, one), one, negative)
    if exponent < 2:
        return base if exponent else one

    def half(root: Any) -> Any:
        return root * root * base if exponent % 2 else root * root

    return let(_known_power(base, exponent // 2), half)


def fma(a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``, which Dynamo makes of `addcmul_` and `addcdiv_`.

    Among integers a `b` with a fraction is cut, as eager cuts their `value`.
    """
    kind = dtype(a)
    if not is_float(a) and is_float(b):
        return cast(op.add(op.multiply(a, cast(b, kind)), c), dtype(b))
    wider = compute_dtype(kind)
    a, b, c = (cast(x, wider) for x in (a, b, c))
    return cast(op.add(op.multiply(a, b), c), kind)


if hasattr(prims, "fma"):  # not in every version of PyTorch
    converts(prims.fma.default)(fma)


@converts(aten.hypot.default, prims.hypot.default, promote=Promotion.DEFAULT)
def hypot(self: Any, other: Any) -> Any:
    """The length of a right triangle's long side, without overflow."""
    return elementwise("hypot", tirx.hypot, self, other)


@converts(aten.nextafter.default, prims.nextafter.default, promote=Promotion.NO_OPMATH)
def nextafter(self: Any, other: Any) -> Any:
    """The next number that the dtype has in the other's direction."""
    kind = dtype(self)
    if kind not in ("float16", "bfloat16"):
        return elementwise("nextafter", tirx.nextafter, self, other)

    def body(x: Any, y: Any) -> Any:
        zero, one = number(0.0, x), tirx.const(1, "int32")
        away = tirx.Or(tirx.And(x > zero, y > x), tirx.And(x < zero, y < x))
        bits = _half_bits(tirx.abs(x), kind)
        next_one = tirx.copysign(_of_half_bits(select(away, bits + one, bits - one), kind), x)
        least = tirx.copysign(_of_half_bits(one, kind), y)
        moved = select(tirx.EQ(x, zero), least, next_one)
        moved = select(tirx.EQ(x, y), y, moved)
        return select(tirx.Or(tirx.isnan(x), tirx.isnan(y)), x + y, moved)

    return elementwise("nextafter", body, cast(self, "float32"), cast(other, "float32"))


def _half_bits(x: Any, kind: str) -> Any:
    """The bits of a half-precision number that a float32 holds."""
    if kind == "float16":
        return tirx.Cast("int32", tirx.reinterpret("uint16", tirx.Cast("float16", x)))
    return tirx.reinterpret("int32", x) >> tirx.const(16, "int32")


def _of_half_bits(bits: Any, kind: str) -> Any:
    if kind == "float16":
        return tirx.Cast("float32", tirx.reinterpret("float16", tirx.Cast("uint16", bits)))
    return tirx.reinterpret("float32", bits << tirx.const(16, "int32"))


@converts(aten.atan2.default, prims.atan2.default, promote=Promotion.INT_TO_FLOAT)
def atan2(self: Any, other: Any) -> Any:
    """The angle of the point (other, self), signs of zeros told apart."""
    return elementwise("atan2", lambda y, x: extern("atan2", y, x), self, other)


@converts(aten.copysign.Tensor, aten.copysign.Scalar, promote=Promotion.INT_TO_FLOAT)
def copysign_(self: Any, other: Any) -> Any:
    """The magnitude of the one with the sign of the other, zeros and NaN included."""
    return elementwise("copysign", copysign, self, other)
