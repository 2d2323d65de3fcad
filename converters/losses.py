"""Negative log-likelihood backwards; it and the other losses are PyTorch's decompositions."""

from __future__ import annotations

from typing import Any

import torch

from .common import cast, const, converts, dtype, emit, ndim, op, reshape, scalar, shape
from .reductions import wide

aten = torch.ops.aten

MEAN = 1  # reduction: 0 none, 1 mean, 2 sum


def classes(count: Any, kind: str) -> Any:
    """The numbers of the classes."""
    return op.arange(0, count, 1, kind)


def along(values: Any, axis: int, rank: int) -> Any:
    """A vector along one axis of a shape that broadcasts."""
    sizes: list[Any] = [1] * rank
    sizes[axis] = shape(values)[0]
    return reshape(values, sizes)


@converts(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    grad_output: Any,
    self: Any,
    target: Any,
    weight: Any,
    reduction: int,
    ignore_index: Any,
    total_weight: Any,
) -> Any:
    """The gradient stands at the target's class alone; an ignored target has none."""
    rank, axis = ndim(self), 1 if ndim(self) > 1 else 0
    grad = wide(grad_output)
    if reduction == MEAN:
        grad = emit(op.divide(grad, cast(total_weight, dtype(grad))))
    if rank == 1 and ndim(target) == 1:
        target = emit(reshape(op.strided_slice(target, [0], [0], [1]), []))
    if ndim(target) == rank - 1 and rank > 1:
        target = op.expand_dims(target, axis)
        grad = emit(op.expand_dims(grad, axis)) if ndim(grad) else grad
    target = emit(target)
    if weight is not None:
        grad = emit(op.multiply(grad, along(emit(cast(weight, dtype(grad))), axis, rank)))
    every = along(emit(classes(shape(self)[axis], dtype(target))), axis, rank)
    hit = op.logical_and(
        op.equal(every, target), op.not_equal(target, scalar(ignore_index, dtype(target)))
    )
    return cast(op.where(hit, op.negative(grad), const(0, grad)), dtype(self))
