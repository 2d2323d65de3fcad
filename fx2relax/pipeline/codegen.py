"""TVM's lowering of a scheduled kernel, with vector loops and vector math put in on the way."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.tirx import compilation_pipeline

from .bfloat import HALF, Broadcast, WidenBFloat16
from .contraction import SUMS, Rounded
from .divisions import ROUNDED, Divisions, by_no_number, sizes_of
from .interiors import BORDERS, Interiors
from .lets import LETS, ChainLets, StoreLets
from .libm import Doubles, Renamed, has_another_name
from .pieces import CHOICES, Pieces
from .polynomials import SCALES
from .present import Wanted, present
from .ramps import RAMPS, Ramps
from .simplify import flatten, on_indices
from .target import has_features
from .tir import NotHandled, Rewriter, kernel_pass
from .unaligned import unaligned
from .vector import Vectorize
from .vectormath import MATH, VectorMath
from .wrapping import READ_INTEGERS, Wrap

NAME = "fx2relax"
#: The same, for kernels whose caller vouches for their arguments.
UNCHECKED = "fx2relax.unchecked"
ASSERTS = "fx2relax.Asserts"
VECTORIZED = "fx2relax.Vectorize"


# What rewrites a kernel's loops, in this order, and what it looks for. The first finds every node
# that no rewriter knows, so that all of them leave such a kernel as it is.
_STEPS: tuple[tuple[Any, Wanted | None], ...] = (
    (Doubles, None),
    (Interiors, BORDERS),
    (Pieces, CHOICES),
    (WidenBFloat16, HALF),
    (Vectorize, None),
    (Rounded, SUMS),
    (VectorMath, MATH),
    (ChainLets, LETS),
)


def _vectorized(func: Any) -> Any:
    """Vector loops, then vector math, in one kernel."""
    body = func.body
    scales = SCALES.set(has_features(func.attrs["target"], "avx512f"))
    try:
        for rewriter, wanted in _STEPS:
            if wanted is None or present(body, wanted):
                body = rewriter().stmt(body)
        return body
    finally:
        SCALES.reset(scales)


def _alone(transform: Any, func: Any) -> Any:
    """A kernel after a pass over modules."""
    name = tvm.ir.GlobalVar("kernel")
    return transform(tvm.IRModule({name: func}))[name]


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="fx2relax.LegalizeBFloat16")  # type: ignore[untyped-decorator]
def _legalize_bfloat16(func: Any, mod: Any, ctx: Any) -> Any:
    """TVM's own widening of bfloat16, for kernels that `WidenBFloat16` left as they were.

    In others it would make float32 of the memory between two loops, which they read as bits.
    """
    if func.attrs is not None and VECTORIZED in func.attrs:
        return func
    return _alone(tirx.transform.BF16ComputeLegalize(), func)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="fx2relax.NarrowDataType")  # type: ignore[untyped-decorator]
def _narrow(func: Any, mod: Any, ctx: Any) -> Any:
    """Indices of 32 bits where they suffice."""
    try:
        return _alone(tirx.transform.NarrowDataType(32), func)
    except tvm.error.InternalError:
        # It remembers a bound of an integer in one branch, and finds another in the next.
        return func


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="fx2relax.MarkAsserts")  # type: ignore[untyped-decorator]
def _mark_asserts(func: Any, mod: Any, ctx: Any) -> Any:
    """Tell the kernels that raise errors of their own."""
    search = _Assertions()
    try:
        search.stmt(func.body)
    except NotHandled:
        return func.with_attr(ASSERTS, True)
    return func.with_attr(ASSERTS, True) if search.found else func


class _Assertions(Rewriter):
    def __init__(self) -> None:
        self.found = False

    def expr(self, node: Any) -> Any:
        """No expression holds a statement."""
        return node

    def visit_AssertStmt(self, node: Any) -> Any:
        self.found = True
        return node


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="fx2relax.SkipChecks")  # type: ignore[untyped-decorator]
def _skip_checks(func: Any, mod: Any, ctx: Any) -> Any:
    """Drop the checks of a kernel's arguments: most of a small kernel's code."""
    if func.attrs is not None and ASSERTS in func.attrs:
        return func
    return _alone(tirx.transform.SkipAssert(), func)


_vectorize = kernel_pass(VECTORIZED, _vectorized)
_broadcast = kernel_pass(
    "fx2relax.BroadcastBFloat16", lambda func: Broadcast().stmt(func.body), HALF
)
_divisions = kernel_pass(
    "fx2relax.Divisions",
    lambda func: Divisions(sizes_of(func)).stmt(func.body),
    dict.fromkeys(ROUNDED, by_no_number),
)
_wrap = kernel_pass("fx2relax.Wrap", lambda func: Wrap().stmt(func.body), READ_INTEGERS)
_renamed = kernel_pass(
    "fx2relax.Renamed", lambda func: Renamed().stmt(func.body), {tvm.ir.Call: has_another_name}
)
_ramps = kernel_pass("fx2relax.Ramps", lambda func: Ramps().stmt(func.body), RAMPS)
_store_lets = kernel_pass("fx2relax.StoreLets", lambda func: StoreLets().stmt(func.body), LETS)


def _host_passes(checked: bool) -> Any:
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
                *flatten(),
                *on_indices(plain.StmtSimplify()),
                _vectorize,
                _legalize_bfloat16,
                plain.ConvertSSA(),
                _narrow,
                plain.VectorizeLoop(True),
                _ramps,
                _broadcast,
                plain.StorageRewrite(),
                passes.RewriteUnsafeSelect(),
                _store_lets,
                *on_indices(
                    passes.HoistIfThenElse(),
                    plain.UnrollLoop(),
                    passes.RenormalizeSplitPattern(),
                    plain.StmtSimplify(),
                    plain.RemoveNoOp(),
                ),
                plain.FP8ComputeLegalize(),
                _divisions,
                _wrap,
                _renamed,
                _store_lets,
                plain.VerifyMemory(),
                plain.AnnotateEntryFunc(),
                plain.SplitHostDevice(),
                *([] if checked else [_mark_asserts]),
                plain.MakePackedAPI(),
                unaligned,
                *([] if checked else [_skip_checks]),
                plain.FP8StorageLegalize(),
                plain.BF16StorageLegalize(),
            ]
        )(mod)

    return (
        lower,
        compilation_pipeline.finalize_host_passes,
        compilation_pipeline.finalize_device_passes,
    )


compilation_pipeline.register_tir_pipeline(NAME, lambda: _host_passes(checked=True))
compilation_pipeline.register_tir_pipeline(UNCHECKED, lambda: _host_passes(checked=False))
