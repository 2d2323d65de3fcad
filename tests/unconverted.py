"""Two operators that nothing converts or decomposes."""

from __future__ import annotations

import torch


@torch.library.custom_op("fx2relax_tests::first", mutates_args=())
def first(x: torch.Tensor) -> torch.Tensor:
    """An operator that only PyTorch runs."""
    return x * 2 + 1


@torch.library.custom_op("fx2relax_tests::second", mutates_args=())
def second(x: torch.Tensor) -> torch.Tensor:
    """Another."""
    return x - 3


for _operator in (first, second):
    _operator.register_fake(torch.empty_like)
