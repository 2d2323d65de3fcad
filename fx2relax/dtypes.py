"""PyTorch dtypes and TVM dtype strings, one for one."""

from __future__ import annotations

from typing import Any

import torch

_TO_TVM: dict[torch.dtype, str] = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.uint16: "uint16",
    torch.uint32: "uint32",
    torch.uint64: "uint64",
    torch.bool: "bool",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
}
_TO_TORCH = {name: dtype for dtype, name in _TO_TVM.items()}


def has_tvm(dtype: torch.dtype) -> bool:
    """Whether TVM has this dtype; complex and quantised dtypes have none."""
    return dtype in _TO_TVM


def to_tvm(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``"float32"``. Raises ValueError for a dtype that TVM lacks."""
    try:
        return _TO_TVM[dtype]
    except KeyError:
        raise ValueError(f"TVM has no dtype for {dtype}") from None


def to_torch(dtype: Any) -> torch.dtype:
    """``"float32"`` (or a TVM dtype object) -> ``torch.float32``."""
    try:
        return _TO_TORCH[str(dtype)]
    except KeyError:
        raise ValueError(f"PyTorch has no dtype for {dtype}") from None


def as_tvm(dtype: Any) -> str:
    """A dtype in any spelling (torch, TVM, string, NumPy) as TVM's string."""
    if isinstance(dtype, torch.dtype):
        return to_tvm(dtype)
    name = str(getattr(dtype, "name", dtype)).removeprefix("torch.")
    if name not in _TO_TORCH:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(sorted(_TO_TORCH))}")
    return name
