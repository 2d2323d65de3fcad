"""One pool of threads for generated kernels and for PyTorch's own.

TVM runs parallel loops on a pool of its own, with half of the cores. Beside the OpenMP pool that
PyTorch uses, the two take the cores from each other: each spins while the other works. Where a C
compiler is at hand, parallel loops run on PyTorch's OpenMP pool instead, with as many threads as
`torch.get_num_threads()` says at each call. Elsewhere TVM's pool gets that number once.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
import tvm_ffi

_log = logging.getLogger(__name__)
_SYMBOL = b"__TVMBackendParallelLaunch"
# The lambda's signature and the group's layout are TVM's C ABI (runtime/c_backend_api.h).
_SOURCE = r"""
#include <stdatomic.h>
typedef struct { void *sync; int num_task; } Group;
typedef int (*Lambda)(int, Group *, void *);
typedef struct { Lambda lambda; void *data; atomic_int failed; } Job;
static void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*thread_num)(void);
static int (*num_threads)(void);
static void task(void *p) {
  Job *job = p;
  Group group = {0, num_threads()};
  if (job->lambda(thread_num(), &group, job->data)) atomic_store(&job->failed, -1);
}
int fx2relax_launch(Lambda lambda, void *data, int tasks) {
  Job job = {lambda, data, 0};
  (void)tasks;
  parallel(task, &job, 0, 0);
  return atomic_load(&job.failed);
}
void fx2relax_bind(void *p, void *t, void *n) { parallel = p; thread_num = t; num_threads = n; }
"""


@functools.cache
def share_threads() -> bool:
    """Let generated kernels use PyTorch's threads; returns whether the OpenMP pool is shared.

    Takes effect for executables built afterwards, and is done once for a process.
    """
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
    try:
        helper = ctypes.CDLL(str(_compiled()))
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        symbols = [ctypes.cast(getattr(openmp, n), ctypes.c_void_p) for n in names]
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        _log.info("TVM's own thread pool is used: %s", error)
        return None
    helper.fx2relax_bind.argtypes = [ctypes.c_void_p] * 3
    helper.fx2relax_bind(*symbols)
    return ctypes.cast(helper.fx2relax_launch, ctypes.c_void_p).value


def _openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that PyTorch has loaded: another copy would bring another pool."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    found = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
    return ctypes.CDLL(found.pop()) if len(found) == 1 else None


def _compiled() -> Path:
    """The helper as a shared library, compiled at first use and kept in the user's cache."""
    compiler = next(
        (c for c in (os.environ.get("CC"), "cc", "gcc", "clang") if c and shutil.which(c)), None
    )
    if compiler is None:
        raise OSError("there is no C compiler")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fx2relax"
    library = cache / f"launch-{hashlib.sha256(_SOURCE.encode()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        built = Path(folder) / "launch.so"
        subprocess.run(
            [compiler, "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(built)],
            input=_SOURCE.encode(),
            check=True,
            capture_output=True,
            timeout=60,
        )
        # Atomic: another process may be doing the same.
        built.replace(library)
    return library
