"""Compiled programs out of the bytes of a shared library."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import tvm_ffi

from fx2relax import disk, tvm_runtime
from fx2relax.runtime import lapack as lapack  # register what programs call
from fx2relax.runtime import on_weights as on_weights


def load(library: bytes, kind: str = "cpu") -> Any:
    """The module that virtual machines run, from what `pipeline.library_code` returned.

    The bytes are loaded from a file of this process alone, which is gone afterwards: the linker
    would take one file that is loaded twice for one library, whose context both would share, and
    nothing can happen to it between a check of the bytes and their use.

    Args:
        library: the bytes.
        kind: of the device that its kernels run on, "cpu" or "cuda".
    """
    try:
        with tempfile.TemporaryDirectory(prefix="fx2relax-") as folder:
            return _load(library, Path(folder), kind)
    except Exception as error:
        # The temporary folder may be full, or nothing in it may be run.
        try:
            kept = disk.native()
            disk.own_folder(kept)
            with disk.own_workshop(kept) as other:
                return _load(library, other, kind)
        except Exception:
            raise error from None


def _load(library: bytes, folder: Path, kind: str) -> Any:
    path = folder / "program.so"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(library)
    tvm_runtime.start(kind)
    return tvm_ffi.load_module(str(path))
