"""What a program for a GPU calls in PyTorch: for memory, and for numbers that the host needs.

Importing this module registers the functions. The current device and stream are those of the call.
"""

from __future__ import annotations

from typing import Any

import torch
import tvm_ffi
from torch.utils.dlpack import from_dlpack

from fx2relax.dtypes import to_torch
from fx2relax.runtime.boundary import ready
from fx2relax.runtime.owned import remember

#: Memory: a shape, TVM's name of a dtype, PyTorch's kind of device.
EMPTY = "fx2relax.gpu.empty"
#: The shape that a tensor of one axis holds.
SIZES = "fx2relax.gpu.sizes"
#: A condition, a tensor of one bool, where the virtual machine can look at it.
TRUTH = "fx2relax.gpu.truth"


def _empty(shape: Any, dtype: Any, kind: Any) -> torch.Tensor:
    fresh = torch.empty(tuple(shape), dtype=to_torch(dtype), device=str(kind))
    if not fresh.numel():
        return ready(fresh)
    remember(fresh)
    return fresh


def _on_host(tensor: Any) -> torch.Tensor:
    """A copy that waits for the current stream alone."""
    there = from_dlpack(tensor.__dlpack__())
    if there.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("no captured graph can read a size or a condition from a GPU")
    return there.cpu()


def _sizes(tensor: Any) -> Any:
    return tvm_ffi.Shape(tuple(_on_host(tensor).tolist()))


for _name, _function in ((EMPTY, _empty), (SIZES, _sizes), (TRUTH, _on_host)):
    tvm_ffi.register_global_func(_name, _function, override=True)
