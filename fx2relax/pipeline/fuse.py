"""Join chains of kernels into one."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax


def fuse(mod: Any) -> Any:
    """Fuse the `call_tir` kernels of a legalised module; other calls stay as they are."""
    passes = relax.transform
    return tvm.transform.Sequential(
        [
            passes.ConvertToDataflow(),
            passes.AnnotateTIROpPattern(),
            passes.FoldConstant(),
            passes.FuseOps(),
            passes.FuseTIR(),
            passes.DeadCodeElimination(),
        ]
    )(mod)
