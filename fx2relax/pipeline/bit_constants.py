"""Constants that are written as the bits of another dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm_ffi
from tvm import ir, tirx

_KINDS = ("int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "float32", "float64")


def with_plain_constants(function: Any) -> Any:
    """A kernel without them: TVM's text for CUDA takes the address of a number, which has none."""
    return tvm_ffi.structural_map(function, (ir.Call, _plain))


def _plain(call: Any) -> Any:
    if getattr(call.op, "name", "") != "tirx.reinterpret":
        return call
    (given,) = call.args
    source, target = (str(e.ty.dtype) for e in (given, call))
    if not isinstance(given, (tirx.IntImm, tirx.FloatImm)) or {source, target} - set(_KINDS):
        return call
    found = np.array(given.value, source).view(target)
    return tirx.const(found.item(), target) if np.isfinite(found) else call
