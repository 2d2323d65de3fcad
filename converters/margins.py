"""Margin losses over classes: what PyTorch does not decompose, or decomposes wrongly."""

from __future__ import annotations

from typing import Any

import torch

from .common import cast, const, converts, dtype, emit, ndim, op, reshape, scalar, shape
from .losses import MEAN, along, classes

aten = torch.ops.aten


@converts(aten.multi_margin_loss_backward.default)
def multi_margin_loss_backward(
    grad_output: Any,
    self: Any,
    target: Any,
    p: Any,
    margin: Any,
    weight: Any = None,
    reduction: int = 1,
) -> Any:
    """Every class within the margin is pushed down, the target up by as much in all."""
    x = self if ndim(self) == 2 else emit(reshape(self, [1, *(shape(self) or [1])]))
    batch, count = shape(x)
    target = emit(reshape(target, [batch, 1]))
    hit = emit(op.equal(along(classes(count, dtype(target)), 1, 2), target))
    zero = const(0, x)
    chosen = op.sum(op.where(hit, x, zero), [1], keepdims=True)
    gap = op.add(op.subtract(x, chosen), const(margin, x))
    push = op.astype(op.greater(gap, zero), dtype(x))
    if p == 2:
        push = op.multiply(op.multiply(push, gap), const(2, x))
    scale = reshape(grad_output, [batch, 1] if ndim(grad_output) else [1, 1])
    divisor = count * batch if reduction == MEAN else count
    scale = op.divide(scale, cast(divisor, dtype(x)))
    if weight is not None:
        row = along(weight, 0, 1)
        scale = op.multiply(scale, op.sum(op.where(hit, row, zero), [1], keepdims=True))
    push = emit(op.multiply(op.where(hit, zero, push), scale))
    pull = op.negative(op.sum(push, [1], keepdims=True))
    return reshape(op.where(hit, pull, push), shape(self))


class _Pairs:
    """Targets against other classes; a row's targets end at its first -1."""

    def __init__(self, x: Any, target: Any) -> None:
        self.sizes = shape(x) if ndim(x) == 2 else [1, *(shape(x) or [1])]
        self.batch, self.count = self.sizes
        self.x, target = (emit(reshape(v, self.sizes)) for v in (x, target))
        kind = self.kind = dtype(x)
        ended = op.cumsum(cast(op.less(target, const(0, target)), "int64"), 1)
        valid = cast(op.equal(ended, scalar(0, "int64")), kind)
        every = reshape(classes(self.count, dtype(target)), [1, 1, self.count])
        named = cast(op.equal(op.expand_dims(target, 2), every), kind)
        # How often a row names each class.
        self.times = emit(op.sum(op.multiply(named, op.expand_dims(valid, 2)), [1]))
        # Element (n, t, j): target t, other class j.
        gap = op.subtract(op.expand_dims(self.x, 1), op.expand_dims(self.x, 2))
        self.gap = emit(op.add(gap, const(1, self.x)))

    def weigh(self, values: Any, is_target: Any) -> Any:
        """Values of pairs, times how often the target is named; 0 where j is a target too."""
        other = op.expand_dims(op.subtract(const(1, self.x), is_target), 1)
        return op.multiply(op.multiply(values, other), op.expand_dims(self.times, 2))

    def divisor(self, reduction: int) -> Any:
        """What the sum of a row is divided by."""
        return cast(self.count * self.batch if reduction == MEAN else self.count, self.kind)


@converts(aten.multilabel_margin_loss_forward.default)
def multilabel_margin_loss(self: Any, target: Any, reduction: int) -> Any:
    """How far every other class comes within 1 of each target; and which classes are targets."""
    pairs = _Pairs(self, target)
    wanted = emit(cast(op.greater(pairs.times, const(0, pairs.x)), pairs.kind))
    near = pairs.weigh(op.maximum(pairs.gap, const(0, pairs.x)), wanted)
    none = reduction == 0
    loss = op.divide(op.sum(near, [1, 2] if none else None), pairs.divisor(reduction))
    left = [pairs.batch] if none and ndim(self) == 2 else []
    return reshape(loss, left), reshape(wanted, shape(target))


@converts(aten.multilabel_margin_loss_backward.default)
def multilabel_margin_loss_backward(
    grad_output: Any, self: Any, target: Any, reduction: int, is_target: Any
) -> Any:
    """Each class within 1 of a target is pushed down, the target up."""
    pairs = _Pairs(self, target)
    near = cast(op.greater(pairs.gap, const(0, pairs.x)), pairs.kind)
    share = emit(pairs.weigh(near, reshape(is_target, pairs.sizes)))
    grad = op.subtract(op.sum(share, [1]), op.sum(share, [2]))
    rows = [pairs.batch, 1] if ndim(grad_output) else [1, 1]
    scale = op.divide(reshape(grad_output, rows), pairs.divisor(reduction))
    return reshape(op.multiply(grad, scale), shape(self))
