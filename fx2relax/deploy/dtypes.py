"""Dtypes in the three spellings that meet here: TVM's, safetensors' and NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np

#: TVM's name, safetensors' name and the bytes of one element.
_ROWS = (
    ("bool", "BOOL", 1),
    ("uint8", "U8", 1),
    ("int8", "I8", 1),
    ("uint16", "U16", 2),
    ("int16", "I16", 2),
    ("uint32", "U32", 4),
    ("int32", "I32", 4),
    ("uint64", "U64", 8),
    ("int64", "I64", 8),
    ("float16", "F16", 2),
    ("bfloat16", "BF16", 2),
    ("float32", "F32", 4),
    ("float64", "F64", 8),
    ("float8_e4m3fn", "F8_E4M3", 1),
    ("float8_e5m2", "F8_E5M2", 1),
    ("float8_e8m0fnu", "F8_E8M0", 1),
    ("float8_e4m3fnuz", "F8_E4M3FNUZ", 1),
    ("float8_e5m2fnuz", "F8_E5M2FNUZ", 1),
)
#: Bytes of one element, by TVM's name.
SIZES = {name: size for name, _, size in _ROWS}
#: safetensors' name, by TVM's.
TO_FILE = {name: code for name, code, _ in _ROWS}
#: TVM's name, by safetensors'.
FROM_FILE = {code: name for name, code, _ in _ROWS}


def is_foreign(name: str) -> bool:
    """Whether NumPy has no dtype of its own for it; `ml_dtypes`, which TVM brings, has one."""
    return name == "bfloat16" or name.startswith("float8")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of TVM's name."""
    if not is_foreign(name):
        return np.dtype(name)
    import ml_dtypes

    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return found


def bits_dtype(name: str) -> np.dtype[Any]:
    """The unsigned integers of the same size."""
    return np.dtype(f"uint{8 * SIZES[name]}")
