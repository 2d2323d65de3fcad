"""How far a side's results are from eager's, and how far they may be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

#: The largest difference allowed, over the largest value of the tensor. float32 sums in another
#: order stay orders of magnitude below the first; bfloat16 in place of float32 does not.
TOLERANCE = {"inference": 1e-3, "train": 1e-3, "autocast": 5e-2}
#: A tensor whose values are all small beside the other tensors' is held to this share of theirs:
#: the gradient of a bias before a BatchNorm is zero but for rounding.
_SMALL = 0.01
# Gradients through BatchNorm and ReLU are as uncertain in eager: a sum that is rounded otherwise
# turns a ReLU on or off; deep nets of random weights multiply what bfloat16 rounds. So many times
# eager's own distance from a float64 run is right, too.
_TIMES, _FLOOR = 4.0, 1e-6


def _pair(got: Tensor, expected: Tensor) -> tuple[float, float]:
    """The largest difference and the largest expected value, both of finite elements."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return math.inf, 1.0
    if expected.numel() == 0:
        return 0.0, 0.0
    if not expected.dtype.is_floating_point:
        return (0.0 if torch.equal(got, expected) else math.inf), 0.0
    a, b = got.detach().double(), expected.detach().double()
    finite = b.isfinite()
    if not torch.equal(a[~finite].nan_to_num(nan=7.0), b[~finite].nan_to_num(nan=7.0)):
        return math.inf, 1.0
    difference = (a[finite] - b[finite]).abs()
    if difference.numel() == 0:
        return 0.0, 0.0
    largest = difference.max().item()
    return (math.inf if math.isnan(largest) else largest), b[finite].abs().max().item()


def errors(got: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[float, float]:
    """The largest absolute error, and the largest one relative to its tensor's largest value.

    Both are infinite if a tensor is missing or has another shape or dtype, if integers differ, or
    if a NaN or an infinity is not where eager has it.
    """
    if len(got) != len(expected):
        return math.inf, math.inf
    pairs = [_pair(g, e) for g, e in zip(got, expected, strict=True)]
    if not pairs:
        return 0.0, 0.0
    least = _SMALL * max(scale for _, scale in pairs)
    absolute = max(error for error, _ in pairs)
    relative = max(
        0.0 if error == 0 else error / max(scale, least) if max(scale, least) else math.inf
        for error, scale in pairs
    )
    return absolute, relative


def doubled(tensors: Sequence[Any]) -> list[Any]:
    """The same, floating-point tensors in float64."""
    return [t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in tensors]


def as_exact(got: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor]) -> bool:
    """Whether results are about as near to those of a float64 run as eager's are."""
    theirs = errors(doubled(eager), exact)[1]
    return errors(doubled(got), exact)[1] <= _TIMES * theirs + _FLOOR
