"""Losses that check their data, as eager does; the others are PyTorch's decompositions."""

from __future__ import annotations

from typing import Any

import torch

from .common import (
    Unsupported,
    cast,
    const,
    converts,
    dtype,
    emit,
    ndim,
    op,
    product,
    reshape,
    scalar,
    shape,
    tirx,
)
from .elementwise import elementwise, nan_max, number
from .indexing import along as gathered
from .indices import checked, take_along
from .opaque import local, loops, opaque, require
from .opaque import wide as index
from .reductions import mean_all, sum_all, wide

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2  # reductions


def classes(count: Any, kind: str) -> Any:
    """The numbers of the classes."""
    return op.arange(0, count, 1, kind)


def along(values: Any, axis: int, rank: int) -> Any:
    """A vector along one axis of a shape that broadcasts."""
    sizes: list[Any] = [1] * rank
    sizes[axis] = shape(values)[0]
    return reshape(values, sizes)


@converts(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(
    self: Any, target: Any, weight: Any, reduction: int, ignore_index: Any
) -> tuple[Any, Any]:
    """The loss and the weights' sum; a target that is no class and not ignored is an IndexError."""
    rank, axis = ndim(self), 1 if ndim(self) > 1 else 0
    if ndim(target) != max(rank - 1, 0):
        raise Unsupported("a target of another rank")
    kind, none = dtype(self), const(0, self)
    counted = emit(op.not_equal(target, scalar(ignore_index, dtype(target))))
    known = emit(op.where(counted, target, const(0, target)))
    message = "Target is out of bounds."  # eager names it; a kernel's messages are fixed
    at = emit(checked([known], [shape(self)[axis]], wrap=False, message=message))
    loss = op.squeeze(gathered(self, axis, emit(op.expand_dims(at, axis))), [axis])
    total: Any = None
    if weight is not None:
        share = emit(take_along(weight, at, 0))
        loss = emit(op.multiply(emit(loss), share))
        total = op.where(counted, share, none)
    loss = emit(op.where(counted, op.negative(emit(loss)), none))
    if reduction == NONE and rank > 1:
        return loss, none
    total = cast(sum_all(emit(counted if total is None else total)), kind)
    if reduction == NONE:
        return loss, total
    loss, total = emit(sum_all(loss)), emit(total)
    return (op.divide(loss, total) if reduction == MEAN else loss), total


@converts(aten.binary_cross_entropy.default)
def binary_cross_entropy(self: Any, target: Any, weight: Any = None, reduction: int = MEAN) -> Any:
    """RuntimeError for what is no probability; logarithms are no less than -100."""
    kind = dtype(self)
    if any(dtype(x) != kind for x in (target, weight) if x is not None):
        raise Unsupported("several dtypes, which PyTorch refuses")

    def body(p: Any, y: Any) -> Any:
        least = number(-100.0, p)
        rest = nan_max(tirx.log1p(-p), least)
        return (y - number(1.0, y)) * rest - y * nan_max(tirx.log(p), least)

    loss = emit(elementwise("binary_cross_entropy", body, wide(self), wide(target)))
    if weight is not None:
        loss = emit(op.multiply(loss, wide(weight)))
    if reduction != NONE:
        loss = emit(mean_all(loss) if reduction == MEAN else sum_all(loss))
    passed = op.equal(emit(_all_probabilities(wide(self))), scalar(0, "int8"))
    return cast(op.where(passed, loss, const(0, loss)), kind)


def _all_probabilities(x: Any) -> Any:
    """A 0-d zero, which is there only once every element has been found to be from 0 to 1."""
    kind = dtype(x)

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        bad = local("int64")
        bad[0] = index(0)
        with loops(numbers) as (i,):
            inside = tirx.And(ins[0][i] >= tirx.const(0, kind), ins[0][i] <= tirx.const(1, kind))
            bad[0] += tirx.Select(inside, index(0), index(1))
        require(bad[0].equal(index(0)), "all elements of input should be between 0 and 1")
        outs[0][0] = tirx.const(0, "int8")

    found = opaque("all_probabilities", body, [x], lambda _: [(1, "int8")], [product(shape(x))])
    return reshape(found, [])


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
