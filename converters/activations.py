"""Activations that keep a name of their own in Relax; PyTorch decomposes the others."""

from __future__ import annotations

from typing import Any

import torch

from .common import Promotion, Unsupported, cast, compute_dtype, const, converts, dtype, emit, op
from .elementwise import elementwise, extern, number, select

aten = torch.ops.aten


@converts(aten.relu.default, promote=Promotion.DEFAULT)
def relu(self: Any) -> Any:
    """What is above zero; NaN and -0.0 stay, which TVM's own relu drops."""
    return elementwise("relu", lambda x: select(x < number(0, x), number(0, x), x), self)


@converts(aten.leaky_relu.default, promote=Promotion.DEFAULT, promote_args=("self",))
def leaky_relu(self: Any, negative_slope: Any = 0.01) -> Any:
    """``self`` above zero, ``negative_slope * self`` elsewhere."""
    if negative_slope == 0:  # TVM takes x * 0 for 0, which it is not for infinities and NaN
        zero = const(0.0, self)
        return op.where(op.greater(self, zero), self, op.multiply(self, zero))
    return op.nn.leakyrelu(self, float(negative_slope))


@converts(aten.elu.default, promote=Promotion.DEFAULT, promote_args=("self",))
def elu(self: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Any:
    """``scale * self`` from zero up, ``alpha * scale * expm1(input_scale * self)`` below."""

    def scaled(x: Any, factor: float) -> Any:
        return x if factor == 1 else emit(op.multiply(x, const(factor, x)))

    root = scaled(self, float(input_scale))
    grown = elementwise("expm1", lambda x: extern("expm1", x), root)
    below = scaled(grown, float(alpha) * float(scale))
    return op.where(op.less(self, const(0.0, self)), below, scaled(self, float(scale)))


@converts(aten.gelu.default, promote=Promotion.DEFAULT, promote_args=("self",))
def gelu(self: Any, *, approximate: str = "none") -> Any:
    """``self`` times the normal distribution's weight below it, or its form with tanh."""
    return op.nn.gelu(self) if approximate == "none" else op.nn.gelu_tanh(self)


@converts(aten.silu.default, promote=Promotion.DEFAULT)
def silu(self: Any) -> Any:
    """``self * sigmoid(self)``."""
    return op.nn.silu(self)


@converts(aten.hardsigmoid_backward.default)
def hardsigmoid_backward(grad_output: Any, self: Any) -> Any:
    """A sixth of the gradient between -3 and 3; eager's sixth is float32's, for float64 as well."""
    kind = dtype(grad_output)
    inside = op.logical_and(op.greater(self, const(-3.0, self)), op.less(self, const(3.0, self)))
    wide = emit(cast(grad_output, compute_dtype(kind)))
    sixth = torch.tensor(1 / 6, dtype=torch.float32).item()
    scaled = cast(op.multiply(wide, const(sixth, wide)), kind)
    return op.where(inside, scaled, const(0.0, grad_output))


@converts(aten.rrelu_with_noise_functional.default)
def rrelu(
    self: Any,
    noise: Any,
    lower: Any = 0.125,
    upper: Any = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Any:
    """`leaky_relu` with the mean of the bounds, but in training."""
    if training:
        raise Unsupported("random slopes")
    return leaky_relu(self, (lower + upper) / 2), noise
