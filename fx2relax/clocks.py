"""How long a call takes: by the processor's clock, or by a GPU's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class Clock:
    """The clock of one device.

    Args:
        device: where the tensors are that calls work on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    @property
    def stands(self) -> bool:
        """Whether nothing can be timed now: what is being captured is not run."""
        return self._device is not None and torch.cuda.is_current_stream_capturing()

    def timed(self, function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
        """Call a function; the seconds that it took, and what it returned.

        On a GPU, from a moment when the current stream has nothing to do until it has done what the
        function has launched: launching counts where it takes longer than the kernels.
        """
        device = self._device
        if device is None:
            begin = time.perf_counter()
            result = function(*arguments)
            return time.perf_counter() - begin, result
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream(device)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            stream.synchronize()
            start.record(stream)
            result = function(*arguments)
            end.record(stream)
            end.synchronize()
        return start.elapsed_time(end) / 1e3, result
