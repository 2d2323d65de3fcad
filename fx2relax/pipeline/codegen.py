"""TVM's lowering of a scheduled kernel, with vector loops and vector math put in on the way."""

from __future__ import annotations

import contextvars
import logging
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.tirx import compilation_pipeline

from .bfloat import WidenBFloat16
from .divisions import Divisions, sizes_of
from .floats import simplify
from .lets import StoreLets
from .tir import NotHandled
from .vector import Vectorize
from .vectormath import VectorMath

NAME = "fx2relax"
# TVM's analysis of bounds refuses some kernels that bind variables; those are built without.
VECTOR_MATH: contextvars.ContextVar[bool] = contextvars.ContextVar("VECTOR_MATH", default=True)
_log = logging.getLogger(__name__)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="fx2relax.Vectorize")  # type: ignore[untyped-decorator]
def _vectorize(func: Any, mod: Any, ctx: Any) -> Any:
    """Vector loops, then vector math, in one kernel."""
    if not VECTOR_MATH.get():
        return func
    try:
        body = WidenBFloat16().stmt(func.body)
        body = Vectorize().stmt(body)
        body = VectorMath().stmt(body)
    except NotHandled as error:
        _log.debug("a kernel stays scalar: it holds a %s", error)
        return func
    return func.with_body(body)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="fx2relax.Divisions")  # type: ignore[untyped-decorator]
def _divisions(func: Any, mod: Any, ctx: Any) -> Any:
    """Division rounded down, by sizes."""
    try:
        return func.with_body(Divisions(sizes_of(func)).stmt(func.body))
    except NotHandled:
        return func


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="fx2relax.StoreLets")  # type: ignore[untyped-decorator]
def _store_lets(func: Any, mod: Any, ctx: Any) -> Any:
    """What is left to the code generator binds nothing in an expression."""
    try:
        return func.with_body(StoreLets().stmt(func.body))
    except NotHandled:
        return func


def _host_passes() -> Any:
    @tvm.transform.module_pass(opt_level=0, name="fx2relax.LowerKernels")  # type: ignore[untyped-decorator]
    def lower(mod: Any, ctx: Any) -> Any:
        passes, plain = s_tir.transform, tirx.transform
        return tvm.transform.Sequential(
            [
                passes.CanonicalizeLoop(),
                passes.LowerInitBlock(),
                passes.PlanAndUpdateBufferAllocationLocation(),
                passes.ConvertBlocksToOpaque(),
                passes.CompactBufferAllocation(),
                passes.LowerMatchBuffer(),
                passes.AnnotateIrregularLoop(),
                passes.LowerOpaqueBlock(),
                plain.FlattenBuffer(),
                *simplify(),
                _vectorize,
                plain.BF16ComputeLegalize(),
                plain.ConvertSSA(),
                plain.NarrowDataType(32),
                plain.VectorizeLoop(True),
                plain.StorageRewrite(),
                passes.HoistIfThenElse(),
                plain.UnrollLoop(),
                passes.RenormalizeSplitPattern(),
                *simplify(),
                plain.RemoveNoOp(),
                passes.RewriteUnsafeSelect(),
                plain.FP8ComputeLegalize(),
                _divisions,
                _store_lets,
                plain.VerifyMemory(),
                plain.AnnotateEntryFunc(),
                plain.SplitHostDevice(),
                plain.MakePackedAPI(),
                plain.FP8StorageLegalize(),
                plain.BF16StorageLegalize(),
            ]
        )(mod)

    return (
        lower,
        compilation_pipeline.finalize_host_passes,
        compilation_pipeline.finalize_device_passes,
    )


compilation_pipeline.register_tir_pipeline(NAME, _host_passes)
