"""`linear_cross_entropy` in chunks, as plain products and sums.

PyTorch works chunk by chunk, so that the scores of all classes never stand in memory at once; here
they are intermediates like others.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

Tensor = torch.Tensor


def _losses(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    kind: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each row's loss without its weight, its weight, its class, and the logarithms of shares."""
    scores = x.to(kind) @ linear_weight.to(kind).T
    if bias is not None:
        scores = scores + bias.to(kind)
    shares = scores.log_softmax(1)
    ignored = target == ignore_index
    index = torch.where(ignored, 0, target)
    every = torch.ones_like(index, dtype=kind) if weight is None else weight.to(kind)[index]
    row_weight = torch.where(ignored, 0, every)
    return -shares.gather(1, index.unsqueeze(1)).squeeze(1), row_weight, index, shares


def _chunked(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    batch_chunk_size: int,
    acc_policy: str,
    acc_dtype: torch.dtype,
    allow_retain_graph: bool,
    compute_input_grad: bool,
    compute_linear_weight_grad: bool,
    compute_linear_bias_grad: bool,
) -> Any:
    """The mean or the sum, and its gradients by input, matrix and bias where they are asked for."""
    if label_smoothing > 0 or reduction not in ("mean", "sum"):
        return NotImplemented
    losses, row_weight, index, shares = _losses(
        x, linear_weight, target, bias, weight, ignore_index, acc_dtype
    )
    if reduction == "mean":
        total = row_weight.sum()
        row_weight = row_weight / torch.where(total == 0, torch.nan, total)
        empty = x.shape[0] == 0
        loss = (losses * row_weight).sum() if not empty else x.new_full((), torch.nan)
    else:
        loss = (losses * row_weight).sum()
    slope = shares.exp() * row_weight.unsqueeze(1)
    slope = slope.scatter_add(1, index.unsqueeze(1), -row_weight.unsqueeze(1))
    kind = x.dtype
    by_input = (slope @ linear_weight.to(acc_dtype)).to(kind)
    by_weight = (slope.T @ x.to(acc_dtype)).to(kind)
    by_bias = slope.sum(0).to(kind)
    return (
        loss.to(kind),
        by_input if compute_input_grad else x.new_empty((0, 0)),
        by_weight if compute_linear_weight_grad else x.new_empty((0, 0)),
        by_bias if compute_linear_bias_grad else x.new_empty((0,)),
    )


def _chunked_rows(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    batch_chunk_size: int,
    acc_policy: str,
    acc_dtype: torch.dtype,
) -> Tensor:
    losses, row_weight, _, _ = _losses(
        x, linear_weight, target, bias, weight, ignore_index, acc_dtype
    )
    return (losses * row_weight).to(x.dtype)


def rules() -> dict[Any, Callable[..., Any]]:
    """The decompositions, where this PyTorch has the operators (2.13 and later)."""
    try:
        import_module("torch.nn.modules.linear_cross_entropy")  # it registers them
    except ModuleNotFoundError:
        return {}
    ops = torch.ops.torch_nn
    return {
        ops._linear_cross_entropy_batch_chunked.default: _chunked,
        ops._linear_cross_entropy_batch_chunked_no_reduction.default: _chunked_rows,
    }
