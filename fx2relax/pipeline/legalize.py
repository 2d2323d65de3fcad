"""High-level Relax operators to kernels."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax


def legalize(mod: Any) -> Any:
    """Turn every high-level operator into a `call_tir` of a kernel."""
    return tvm.transform.Sequential(
        [
            relax.backend.DispatchSampling(),
            relax.backend.DispatchSortScan(),
            relax.transform.LegalizeOps(),
        ]
    )(mod)
