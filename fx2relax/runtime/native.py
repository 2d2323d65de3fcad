"""The native helper: the library's packed functions in C++, where they can be compiled.

They take the place of the Python functions of `library`, under the same names, and give the same
bits. What they do not do themselves, and all errors, come from those Python functions.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import torch
import tvm_ffi

from . import compiled, library

_log = logging.getLogger(__name__)
_FOLDER = Path(__file__).parent
_SOURCES = [_FOLDER / "native.cpp"]
_HEADERS = sorted(_FOLDER.glob("*.h"))


def use() -> bool:
    """Register the native functions; returns whether they could be had.

    Takes effect for executables loaded afterwards, and is done once for a process. The first time
    on a machine it takes a second or two to compile them.
    """
    return _helper() is not None


def declined() -> int:
    """How many calls of native functions have been left to Python's so far, errors included."""
    helper = _helper()
    return 0 if helper is None else int(helper.fx2relax_declined())


@functools.cache
def _helper() -> ctypes.CDLL | None:
    assert library.FUNCTIONS  # registered before: the native functions fall back on them
    root = Path(torch.__file__).parent
    ffi = Path(tvm_ffi.libinfo.find_libtvm_ffi())
    helper = compiled.load(
        "native",
        _SOURCES,
        headers=_HEADERS,
        include=[str(root / "include"), *tvm_ffi.libinfo.include_paths()],
        flags=[
            "-std=c++17",
            "-ffp-contract=fast",
            "-Wno-psabi",
            # DEFAULT, AVX2, AVX512: a flag, so that the cache keeps each machine's apart.
            f"-DFX2RELAX_{torch.backends.cpu.get_cpu_capability().upper()}",
            f"-L{root / 'lib'}",
            "-ltorch_cpu",
            f"-L{ffi.parent}",
            "-ltvm_ffi",
        ],
    )
    if helper is None:
        return None
    helper.fx2relax_declined.restype = ctypes.c_int64
    if helper.fx2relax_register() != 0:
        _log.warning("TVM does not take the native helper's functions; Python's are used")
        return None
    return helper
