"""One pool of threads for generated kernels and for PyTorch's own.

TVM runs parallel loops on a pool of its own, with half of the cores. Beside the OpenMP pool that
PyTorch uses, the two take the cores from each other: each spins while the other works. Where a C
compiler is at hand, parallel loops run on PyTorch's OpenMP pool instead, with as many threads as
`torch.get_num_threads()` says at each call. Elsewhere TVM's pool gets that number once.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
from pathlib import Path

import torch
import tvm_ffi

from .. import tvm_runtime
from ..runtime import compiled

_log = logging.getLogger(__name__)
_SYMBOL = b"__TVMBackendParallelLaunch"
_SOURCE = Path(compiled.__file__).with_name("launch.c")


@functools.cache
def share_threads() -> bool:
    """Let generated kernels use PyTorch's threads; returns whether the OpenMP pool is shared.

    Takes effect for executables built afterwards, and is done once for a process.
    """
    # Its own pool is registered as it is loaded, and would take the place of this one.
    with contextlib.suppress(ImportError, OSError):
        tvm_runtime.start("cpu")
    launch = _launcher()
    if launch is not None and _register(launch):
        return True
    # The pool reads these when a thread first runs a parallel loop.
    os.environ.setdefault("TVM_NUM_THREADS", str(torch.get_num_threads()))
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    return False


def _register(launch: int) -> bool:
    library = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi())
    register = library.TVMFFIEnvModRegisterContextSymbol
    register.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    return int(register(_SYMBOL, launch)) == 0


def _launcher() -> int | None:
    """The address of the launch function, or None where it cannot be had."""
    openmp = _openmp()
    if openmp is None:
        return None
    helper = compiled.load("launch", [_SOURCE])
    if helper is None:
        return None
    try:
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        symbols = [ctypes.cast(getattr(openmp, n), ctypes.c_void_p) for n in names]
    except AttributeError as error:
        _log.info("TVM's own thread pool is used: %s", error)
        return None
    helper.fx2relax_bind.argtypes = [ctypes.c_void_p] * 4
    helper.fx2relax_bind(*symbols, _settler())
    return ctypes.cast(helper.fx2relax_launch, ctypes.c_void_p).value


def _settler() -> ctypes.c_void_p | None:
    """PyTorch's function that has a thread use as many threads as `torch.set_num_threads` said."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(library.torch_get_num_threads, ctypes.c_void_p)
    return None


def _openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that PyTorch has loaded: another copy would bring another pool."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    found = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
    return ctypes.CDLL(found.pop()) if len(found) == 1 else None
