"""Matrix and vector products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fx2relax import dtypes
from fx2relax.agreement import agreed_factors

from .common import const, converts, dtype, emit, ndim, op, shape, shape_expr

aten = torch.ops.aten

_HALF = ("float16", "bfloat16")


def matmul(a: Any, b: Any, out_dtype: str | None = None) -> Any:
    """``a @ b`` with half-precision sums in float32; integers wrap around."""
    result = emit(accumulated(a, b))
    wanted = out_dtype or dtype(a)
    return result if dtype(result) == wanted else op.astype(result, wanted)


def accumulated(a: Any, b: Any) -> Any:
    """``a @ b`` in the dtype of the sum: float32 for half precision, else the operands' own."""
    return op.matmul(*agreed_factors(a, b), out_dtype="float32" if dtype(a) in _HALF else None)


def _scaled(x: Any, factor: Any) -> Any:
    return x if factor == 1 else op.multiply(x, const(factor, x))


def _add_product(
    self: Any,
    product: Any,
    beta: Any,
    alpha: Any,
    out_dtype: str | None = None,
) -> Any:
    """``beta * self + alpha * product``, rounded once; a beta of 0 ignores `self`, NaN included."""
    wanted = out_dtype or dtype(self)
    if dtype(self) == "bool":
        taken = product if alpha else op.zeros_like(product)
        return op.logical_or(taken, self) if beta else taken
    self, result = emit(self), emit(_scaled(product, alpha))
    if beta != 0:
        if dtype(self) != dtype(result):
            self = emit(op.astype(self, dtype(result)))
        result = emit(op.add(result, _scaled(self, beta)))
    return result if dtype(result) == wanted else op.astype(result, wanted)


def _register_product(target: Any) -> None:
    def product(self: Any, other: Any) -> Any:
        return matmul(self, other)

    converts(target)(product)


for _target in (
    aten.mm.default,
    aten.bmm.default,
    aten.mv.default,
    aten.dot.default,
    aten.vdot.default,  # complex tensors, which vdot conjugates, have no converter
    aten.matmul.default,
    aten.linalg_matmul.default,
):
    _register_product(_target)


@converts(aten.mm.dtype, aten.bmm.dtype)
def mm_dtype(self: Any, mat2: Any, out_dtype: Any) -> Any:
    """Product whose result keeps more digits than its operands."""
    return matmul(self, mat2, dtypes.to_tvm(out_dtype))


@converts(aten._int_mm.default)
def int_mm(self: Any, mat2: Any) -> Any:
    """Product of int8 matrices summed in int32."""
    return op.matmul(self, mat2, out_dtype="int32")


@converts(aten.linear.default)
def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """``input @ weight.T + bias``; the weight may be a vector."""
    product = emit(accumulated(input, transposed(weight)))
    if bias is None:
        return product if dtype(product) == dtype(input) else op.astype(product, dtype(input))
    return _add_product(bias, product, 1, 1)


def transposed(x: Any) -> Any:
    """A matrix, or each matrix of a batch, transposed; a vector as it is."""
    rank = ndim(x)
    if rank < 2:
        return x
    return op.permute_dims(x, [*range(rank - 2), rank - 1, rank - 2])


# `beta * self + alpha * (a @ b)`: the operands' ranks are all that differs.
def _register_add_product(target: Any, multiply: Callable[[Any, Any], Any]) -> None:
    def add_product(self: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
        product = multiply(a, b)
        if alpha == 0 and target in _BLAS and dtype(self) in ("float32", "float64"):
            product = op.zeros(shape_expr(shape(product)), dtype(self))
        return _add_product(self, product, beta, alpha)

    converts(target)(add_product)


# A factor of 0 spares BLAS the product, NaN included.
_BLAS = (aten.addmm.default, aten.addmv.default, aten.addbmm.default)


def _outer(a: Any, b: Any) -> Any:
    if dtype(a) in _HALF:
        a, b = op.astype(a, "float32"), op.astype(b, "float32")
    multiply = op.logical_and if dtype(a) == "bool" else op.multiply
    return multiply(op.expand_dims(a, 1), op.expand_dims(b, 0))


def _summed_products(a: Any, b: Any) -> Any:
    """The sum of a batch of products, as one product with a longer inner axis."""
    batch, rows, inner = shape(a)
    columns = shape(b)[2]
    a = op.reshape(op.permute_dims(a, [1, 0, 2]), (rows, batch * inner))
    return accumulated(a, op.reshape(b, (batch * inner, columns)))


for _target, _multiply in {
    aten.addmm.default: accumulated,
    aten.baddbmm.default: accumulated,
    aten.addmv.default: accumulated,
    aten.addr.default: _outer,
    aten.addbmm.default: _summed_products,
}.items():
    _register_add_product(_target, _multiply)


@converts(aten.addmm.dtype, aten.baddbmm.dtype)
def addmm_dtype(
    self: Any, mat1: Any, mat2: Any, out_dtype: Any, *, beta: Any = 1, alpha: Any = 1
) -> Any:
    """`addmm` whose result keeps more digits than its operands."""
    return _add_product(self, accumulated(mat1, mat2), beta, alpha, dtypes.to_tvm(out_dtype))
