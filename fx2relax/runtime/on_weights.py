"""PyTorch's arithmetic as packed functions, for work on weights alone, which is done once.

Each takes its operands, the sizes that each of them is read with, then the output that it writes
to: dense CPU tensors of floating point. Importing this module registers them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import tvm_ffi

from .library import dense

PREFIX = "fx2relax.weights."


def _copy(x: torch.Tensor, *, out: torch.Tensor) -> None:
    """To another dtype, or more than once."""
    out.copy_(x)


def _on_dense(function: Callable[..., Any]) -> Callable[..., None]:
    def call(*arguments: Any) -> None:
        *given, output = arguments
        count = len(given) // 2
        operands = [
            dense(x).view([int(size) for size in sizes])
            for x, sizes in zip(given[:count], given[count:], strict=True)
        ]
        function(*operands, out=dense(output))

    return call


def _permute(x: Any, axes: Any, output: Any) -> None:
    dense(output).copy_(dense(x).permute([int(axis) for axis in axes]))


#: The packed functions by name, without `PREFIX`.
FUNCTIONS: dict[str, Callable[..., None]] = {
    "add": _on_dense(torch.add),
    "subtract": _on_dense(torch.subtract),
    "multiply": _on_dense(torch.multiply),
    "divide": _on_dense(torch.divide),
    "negative": _on_dense(torch.negative),
    "sqrt": _on_dense(torch.sqrt),
    "copy": _on_dense(_copy),
    "permute": _permute,
}

for _name, _function in FUNCTIONS.items():
    tvm_ffi.register_global_func(PREFIX + _name, _function, override=True)
