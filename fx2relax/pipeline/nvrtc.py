"""Kernels' source through NVRTC, without the C++ library that TVM has it read for each program.

TVM's own way includes libcu++ for eight names of integers and one of infinity: two thirds of a
second for each program, and headers that no package of PyTorch's brings.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import importlib.util
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi

_log = logging.getLogger(__name__)
_HOOK = "tvm_callback_cuda_compile"
_BEGIN, _LAST = "#ifdef __CUDACC_RTC__", "#include <cuda.h>"
_END = "#endif"
_HEADER = "cuda_fp16.h"
_NAMES = """\
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#define INFINITY __int_as_float(0x7f800000)
"""
_ours: contextvars.ContextVar[bool] = contextvars.ContextVar("fx2relax_nvrtc", default=False)
_written: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar(
    "fx2relax_written", default=None
)
_hooked: list[Callable[..., Any]] = []


class _Stop(Exception):
    """The source is written, and nobody wants it compiled."""


@contextlib.contextmanager
def compiled_lightly() -> Iterator[None]:
    """Let what is generated for CUDA in a ``with`` block be compiled as `cubin` does.

    Where that fails, or nvcc is to be used, TVM's own way is gone.
    """
    _hook()
    token = _ours.set(True)
    try:
        yield
    finally:
        _ours.reset(token)


def written_only(generate: Callable[[], Any]) -> None:
    """Generate code for CUDA, and do not compile it.

    Args:
        generate: generates it.

    Raises:
        what `generate` raises before the source is written.
    """
    _hook()
    written: list[str] = []
    token = _written.set(written)
    try:
        generate()
    except Exception:
        if not written:
            raise
    finally:
        _written.reset(token)


def _hook() -> None:
    if _hooked:
        return
    from tvm.support import nvcc as nvcc  # registers TVM's own

    before = tvm_ffi.get_global_func(_HOOK)

    def compile_cuda(source: str, *rest: Any) -> Any:
        written = _written.get()
        if written is not None:
            written.append(source)
            raise _Stop
        mode = os.environ.get("TVM_CUDA_COMPILE_MODE", "nvrtc").lower()
        if _ours.get() and mode == "nvrtc":
            try:
                return cubin(str(source), _arch())
            except Exception as error:  # another release's source, or no headers where we look
                _log.info("TVM compiles a program for CUDA: %s: %s", type(error).__name__, error)
        return before(source, *rest)

    _hooked.append(tvm_ffi.register_global_func(_HOOK, compile_cuda, override=True))


def _arch() -> str:
    return str(tvm.target.Target.current(allow_none=False).attrs["arch"])


def cubin(source: str, arch: str) -> bytes:
    """Compile the source of kernels.

    Args:
        source: as TVM generates it.
        arch: such as ``"sm_90"``.

    Returns:
        the machine code.

    Raises:
        ImportError: there is no ``cuda.bindings``.
        RuntimeError: there are no headers of CUDA's, or NVRTC refuses the source.
    """
    nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")

    def done(result: Any, *found: Any) -> Any:
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(str(result))
        return found[0] if found else None

    options = [f"--gpu-architecture={arch}", "-default-device", "--device-int128"]
    options += [f"--include-path={folder}" for folder in _headers()]
    program = done(*nvrtc.nvrtcCreateProgram(light(source).encode(), b"fx2relax.cu", 0, None, None))
    try:
        said = [option.encode() for option in options]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(said), said)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            text = b" " * done(*nvrtc.nvrtcGetProgramLogSize(program))
            done(*nvrtc.nvrtcGetProgramLog(program, text))
            raise RuntimeError(text.decode(errors="replace").strip(" \0"))
        code: bytes = b" " * done(*nvrtc.nvrtcGetCUBINSize(program))
        done(*nvrtc.nvrtcGetCUBIN(program, code))
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def light(source: str) -> str:
    """The source without what it includes of C++'s library."""
    start, last = source.find(_BEGIN), source.find(_LAST)
    end = source.find(_END, last)
    if not 0 <= start < last < end:
        return source
    return source[:start] + _NAMES + source[end + len(_END) :]


@functools.cache
def _headers() -> list[str]:
    """The folders of CUDA's headers: the toolkit's, or those of the packages that PyTorch needs."""
    roots = [Path(os.environ[n]) for n in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(n)]
    compiler = shutil.which("nvcc")
    roots += [Path(compiler).resolve().parents[1]] if compiler else []
    found = importlib.util.find_spec("nvidia")
    packages = list(found.submodule_search_locations or []) if found is not None else []
    roots += [Path(p) / name for p in packages for name in ("cu13", "cuda_runtime")]
    roots.append(Path("/usr/local/cuda"))
    for root in roots:
        if (root / "include" / _HEADER).exists():
            parts = (root / "include", root / "include" / "cccl")
            return [str(part) for part in parts if part.exists()]
    raise RuntimeError(f"no folder of CUDA's has {_HEADER}; CUDA_HOME names one that does")
