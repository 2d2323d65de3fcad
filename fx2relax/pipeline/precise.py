"""Elementary functions on a GPU as PyTorch's own kernels there compute them.

TVM has its source for CUDA compiled with fast math, by which the tanh of float32 has eleven bits,
and the sine of a large number few that are right. The source names the precise functions of
NVIDIA's library instead, which no option changes.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import tvm_ffi

_HOOK = "tvm_callback_cuda_postproc"
_UNARY = ("sinf", "cosf", "tanf", "tanhf", "expf", "exp10f", "logf", "log2f", "log10f")
_KERNEL = 'extern "C" __global__'
_ours: contextvars.ContextVar[bool] = contextvars.ContextVar("fx2relax_precise", default=False)
_hooked: list[Callable[..., Any]] = []


def precise(source: str) -> str:
    """The source of kernels, with the precise functions; a C++ compiler's own elsewhere."""
    start = source.find(_KERNEL)
    if start < 0:
        return source
    declared = [f"__device__ float __nv_{name}(float);" for name in _UNARY]
    declared.append("__device__ float __nv_powf(float, float);")
    named = [f"#define {name} __nv_{name}" for name in (*_UNARY, "powf")]
    lines = ["#ifdef __CUDACC__", 'extern "C" {', *declared, "}", *named, "#endif", ""]
    return source[:start] + "\n".join(lines) + source[start:]


@contextlib.contextmanager
def precise_sources() -> Iterator[None]:
    """Let what is generated for CUDA in a ``with`` block be `precise`."""
    if not _hooked:
        before = tvm_ffi.get_global_func(_HOOK, allow_missing=True)

        def hook(source: str, *rest: Any) -> str:
            found = str(source if before is None else before(source, *rest))
            return precise(found) if _ours.get() else found

        _hooked.append(tvm_ffi.register_global_func(_HOOK, hook, override=True))
    token = _ours.set(True)
    try:
        yield
    finally:
        _ours.reset(token)
