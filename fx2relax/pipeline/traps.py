"""Assertions of kernels on a GPU."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx


def with_traps(function: Any) -> Any:
    """A kernel whose assertions stop the GPU, as those of PyTorch's kernels there do.

    TVM would write them as calls of its own, which no GPU has.
    """
    found: list[Any] = []
    tvm_ffi.structural_walk(function.body, (tirx.AssertStmt, found.append))
    return tvm_ffi.structural_map(function, (tirx.AssertStmt, _trap)) if found else function


def _trap(assertion: Any) -> Any:
    stop = tirx.Evaluate(tirx.call_extern("void", "__trap"))
    return tirx.IfThenElse(tirx.Not(assertion.condition), stop, None)
