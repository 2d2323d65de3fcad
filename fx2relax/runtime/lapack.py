"""PyTorch's dense linear algebra as one packed function that writes into given outputs.

It takes a description (JSON: the ATen operator, its other arguments, which of its results are
wanted), the operands and the outputs: compact tensors of shape (batch, ...). Importing this module
registers it.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
import tvm_ffi
from torch.utils.dlpack import from_dlpack

from .library import PREFIX

NAME = f"{PREFIX}lapack"


@functools.cache
def _described(text: str) -> tuple[Any, dict[str, Any], list[int], bool]:
    given = json.loads(text)
    packet = getattr(torch.ops.aten, given["target"])
    target = getattr(packet, given["overload"] or "default")
    return target, given["arguments"], given["results"], given["single"]


def lapack(description: str, *tensors: Any) -> None:
    """Call the operator; what it raises for a singular matrix is eager's own error."""
    target, arguments, wanted, single = _described(str(description))
    views = [from_dlpack(t.__dlpack__()) for t in tensors]
    if single:
        views = [v[0] for v in views]
    count = max(len(wanted), 1)
    if not wanted:  # an assertion; it returns 0
        views[-1].zero_()
    results = target(*views[:-count], **arguments)
    if isinstance(results, torch.Tensor):
        results = (results,)
    for index, out in zip(wanted, views[-count:], strict=False):
        out.copy_(results[index])


tvm_ffi.register_global_func(NAME, lapack, override=True)
# Kernels and callbacks raise by the name of a kind.
tvm_ffi.register_error("LinAlgError", torch.linalg.LinAlgError)  # type: ignore[attr-defined]
