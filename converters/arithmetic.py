"""Arithmetic, comparison and logic on elements, with PyTorch's promotion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .common import Promotion, const, converts, dtype, op

aten = torch.ops.aten

# Overloads whose Relax operator takes the promoted operands as they stand.
_BINARY: dict[Any, tuple[Callable[..., Any], Promotion]] = {
    aten.mul.Tensor: (op.multiply, Promotion.DEFAULT),
    aten.mul.Scalar: (op.multiply, Promotion.DEFAULT),
    aten.div.Tensor: (op.divide, Promotion.INT_TO_FLOAT),
    aten.div.Scalar: (op.divide, Promotion.INT_TO_FLOAT),
    aten.atan2.default: (op.atan2, Promotion.INT_TO_FLOAT),
    aten.eq.Tensor: (op.equal, Promotion.ALWAYS_BOOL),
    aten.eq.Scalar: (op.equal, Promotion.ALWAYS_BOOL),
    aten.ne.Tensor: (op.not_equal, Promotion.ALWAYS_BOOL),
    aten.ne.Scalar: (op.not_equal, Promotion.ALWAYS_BOOL),
    aten.lt.Tensor: (op.less, Promotion.ALWAYS_BOOL),
    aten.lt.Scalar: (op.less, Promotion.ALWAYS_BOOL),
    aten.le.Tensor: (op.less_equal, Promotion.ALWAYS_BOOL),
    aten.le.Scalar: (op.less_equal, Promotion.ALWAYS_BOOL),
    aten.gt.Tensor: (op.greater, Promotion.ALWAYS_BOOL),
    aten.gt.Scalar: (op.greater, Promotion.ALWAYS_BOOL),
    aten.ge.Tensor: (op.greater_equal, Promotion.ALWAYS_BOOL),
    aten.ge.Scalar: (op.greater_equal, Promotion.ALWAYS_BOOL),
}


def _register_binary(target: Any, relax_op: Callable[..., Any], promote: Promotion) -> None:
    def binary(self: Any, other: Any) -> Any:
        return relax_op(self, other)

    converts(target, promote=promote)(binary)


for _target, (_op, _promote) in _BINARY.items():
    _register_binary(_target, _op, _promote)


@converts(aten.add.Tensor, promote=Promotion.DEFAULT)
def add(self: Any, other: Any, *, alpha: Any = 1) -> Any:
    """``self + alpha * other``; on booleans the logical or."""
    if dtype(self) == "bool":
        return op.logical_or(self, other)
    return op.add(self, _scaled(other, alpha))


@converts(aten.add.Scalar, promote=Promotion.DEFAULT, promote_args=("self", "other"))
def add_scalar(self: Any, other: Any, alpha: Any = 1) -> Any:
    """`add` of a number."""
    return add(self, other, alpha=alpha)


@converts(aten.sub.Tensor, promote=Promotion.DEFAULT)
def sub(self: Any, other: Any, *, alpha: Any = 1) -> Any:
    """``self - alpha * other``."""
    return op.subtract(self, _scaled(other, alpha))


@converts(aten.sub.Scalar, promote=Promotion.DEFAULT, promote_args=("self", "other"))
def sub_scalar(self: Any, other: Any, alpha: Any = 1) -> Any:
    """`sub` of a number."""
    return sub(self, other, alpha=alpha)


def _scaled(x: Any, alpha: Any) -> Any:
    return x if alpha == 1 else op.multiply(x, const(alpha, x))
