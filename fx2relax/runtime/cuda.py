"""Calls on a GPU of NVIDIA's: its device and PyTorch's current stream are those of each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import tvm_ffi
from torch.utils.dlpack import from_dlpack

from fx2relax import tvm_runtime
from fx2relax.runtime import in_torch as in_torch  # registers what programs call
from fx2relax.runtime.owned import owned

Call = Callable[[Sequence[Any]], list[Any]]


class Gpu:
    """One GPU.

    Args:
        device: PyTorch's, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._where = tvm_runtime.device(str(device))

    def entered(self, call: Call, in_torch: bool = False) -> Call:
        """A call on this GPU and on its current stream, whichever GPU the caller is on.

        TVM launches kernels on a stream of its own notion, and leaves the GPU that it last set.
        Nothing waits for the kernels.

        Args:
            call: the program's.
            in_torch: whether it hands PyTorch's tensors to each kernel, which then is launched on
                the current stream of PyTorch's anyway.
        """
        device, where = self._device, self._where

        def on_stream(arguments: Sequence[Any]) -> list[Any]:
            with torch.cuda.device(device), torch.no_grad():
                stream = torch.cuda.current_stream(device).cuda_stream
                with tvm_ffi.use_raw_stream(where, stream):
                    return call(arguments)

        def at_once(arguments: Sequence[Any]) -> list[Any]:
            if _current() == index and not torch.is_grad_enabled():
                return call(arguments)
            return on_stream(arguments)

        index, _current = device.index, torch.cuda.current_device
        return at_once if in_torch else on_stream

    def streams(self, made: list[Any]) -> Callable[[], None]:
        """Keep tensors that were just made on the current stream in order among all streams.

        Args:
            made: TVM tensors.

        Returns:
            what each call asks before it reads them. A stream that has not read them yet waits
            for the one that made them, and the allocator then waits for it before it gives their
            memory away.
        """
        return _Crossing(self._device, made)


class _Crossing:
    def __init__(self, device: torch.device, made: list[Any]) -> None:
        self._device = device
        maker = torch.cuda.current_stream(device)
        self._known = {maker.cuda_stream}
        self._made = [owned(from_dlpack(tensor.__dlpack__())) for tensor in made]
        self._event = torch.cuda.Event()
        self._event.record(maker)

    def __call__(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        # Whoever captures waits for all streams before, and may wait for none meanwhile.
        if stream.cuda_stream in self._known or torch.cuda.is_current_stream_capturing():
            return
        stream.wait_event(self._event)
        for tensor in self._made:
            tensor.record_stream(stream)
        self._known.add(stream.cuda_stream)
