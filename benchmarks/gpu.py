"""An NVIDIA GPU's clock and memory, in the place of the processor's; see `benchmarks.memory`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks import memory

children_peak = memory.children_peak


def held() -> float:
    """Memory of tensors now, in MB."""
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() / 2**20


def peak() -> float:
    """The most memory of tensors since the start or since `reset_peak`, in MB."""
    return torch.cuda.max_memory_allocated() / 2**20


def reset_peak() -> None:
    """Start `peak` over."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()


def milliseconds(call: Callable[[], Any], calls: int) -> float:
    """The time of so many calls, from an idle GPU until it has done what they launched."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
