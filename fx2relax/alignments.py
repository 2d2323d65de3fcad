"""The loss of an unknown alignment (CTC) as operators whose sizes do not depend on data.

PyTorch's own keeps a table as wide as the longest target, which Dynamo leaves to eager. Here it is
as wide as the targets given.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["ctc_loss"]

aten = torch.ops.aten


def _width(targets: Tensor) -> Any:
    return 2 * targets.shape[-1] + 1


@torch.library.custom_op(
    "fx2relax::ctc_loss",
    mutates_args=(),
    schema="(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, "
    "int blank, bool zero_infinity) -> (Tensor, Tensor)",
)
def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    """The loss of each sequence.

    Args:
        log_probs: float32 or float64, (time, batch, labels).
        targets: (batch, longest), or all of them one after the other.
        input_lengths: int64, how many time steps each sequence has.
        target_lengths: int64, how many labels each target has.
        blank: the label that stands for none.
        zero_infinity: whether an infinite loss has a gradient of zero.

    Returns:
        the losses, and the table (batch, time, width) that their gradient needs.
    """
    loss, table = aten._ctc_loss.Tensor(
        log_probs, targets, input_lengths, target_lengths, blank, zero_infinity
    )
    wide = F.pad(table, (0, _width(targets) - table.shape[2]), value=float("-inf"))
    return loss, wide.contiguous()


@_ctc_loss.register_fake
def _(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    time, batch, labels = log_probs.shape
    torch._check(0 <= blank < labels, lambda: "blank must be in label range")
    for name, lengths in (("input", input_lengths), ("target", target_lengths)):
        torch._check(
            lengths.numel() == batch, lambda name=name: f"{name}_lengths must be of size batch_size"
        )
    if targets.dim() == 2:
        torch._check(
            targets.shape[0] == batch,
            lambda: (
                f"Expected tensor to have size {batch} at dimension 0, but got size "
                f"{targets.shape[0]} for argument #2 'targets' (while checking arguments for "
                "ctc_loss_allocate_outputs)"
            ),
        )
    return log_probs.new_empty([batch]), log_probs.new_empty([batch, time, _width(targets)])


@torch.library.custom_op(
    "fx2relax::ctc_loss_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor log_probs, Tensor targets, Tensor input_lengths, "
    "Tensor target_lengths, Tensor loss, Tensor table, int blank, bool zero_infinity) -> Tensor",
)
def _ctc_loss_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    loss: Tensor,
    table: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """The gradient of `log_probs`."""
    lengths = input_lengths.tolist(), target_lengths.tolist()
    table = table[:, :, : 2 * max(lengths[1], default=0) + 1].contiguous()
    slope: Tensor = aten._ctc_loss_backward.default(
        grad, log_probs, targets, *lengths, loss, table, blank, zero_infinity
    )
    return slope.contiguous()


@_ctc_loss_backward.register_fake
def _(grad: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


def _keep_for_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradient(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    slope = torch.ops.fx2relax.ctc_loss_backward(
        grad.contiguous(), *ctx.saved_tensors, ctx.blank, ctx.zero_infinity
    )
    return slope, None, None, None, None, None


_ctc_loss.register_autograd(_gradient, setup_context=_keep_for_gradient)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """`torch.nn.functional.ctc_loss`."""
    kinds = log_probs.dtype in (torch.float32, torch.float64) and log_probs.device.type == "cpu"
    kinds = kinds and targets.dtype in (torch.int32, torch.int64) and 2 <= log_probs.dim() <= 3
    if not kinds or not 1 <= targets.dim() <= 2 or reduction not in ("none", "mean", "sum"):
        number = {"none": 0, "mean": 1, "sum": 2}[reduction]
        return torch.ctc_loss(
            log_probs, targets, input_lengths, target_lengths, blank, number, zero_infinity
        )
    counts = []
    for given in (input_lengths, target_lengths):
        counts.append(torch.as_tensor(given, dtype=torch.int64).reshape(-1))
    batched = log_probs.dim() == 3
    loss: Tensor
    loss, _ = torch.ops.fx2relax.ctc_loss(
        log_probs if batched else log_probs.unsqueeze(1),
        targets,
        counts[0],
        counts[1],
        blank,
        zero_infinity,
    )
    if zero_infinity:
        loss = torch.where(loss == float("inf"), 0.0, loss)
    if reduction == "mean":
        return (loss / counts[1].to(loss.dtype).clamp_min(1)).mean()
    if reduction == "sum":
        return loss.sum()
    return loss if batched else loss.squeeze(0)
