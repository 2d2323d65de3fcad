"""Matrix products."""

from __future__ import annotations

from typing import Any

import torch

from .common import const, converts, op

aten = torch.ops.aten


@converts(aten.mm.default)
def mm(self: Any, mat2: Any) -> Any:
    """Product of two matrices."""
    return op.matmul(self, mat2)


@converts(aten.bmm.default)
def bmm(self: Any, mat2: Any) -> Any:
    """Product of two batches of matrices."""
    return op.matmul(self, mat2)


@converts(aten.addmm.default)
def addmm(self: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """``beta * self + alpha * (mat1 @ mat2)``; a beta of 0 ignores `self`, NaN included."""
    product = op.matmul(mat1, mat2)
    if alpha != 1:
        product = op.multiply(product, const(alpha, product))
    if beta == 0:
        return product
    return op.add(product, self if beta == 1 else op.multiply(self, const(beta, self)))


@converts(aten.t.default)
def t(self: Any) -> Any:
    """Transpose of a matrix; vectors and 0-d tensors stay as they are."""
    from .common import ndim

    return op.permute_dims(self) if ndim(self) == 2 else self
