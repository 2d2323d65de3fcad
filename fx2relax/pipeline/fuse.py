"""Join chains of kernels into one."""

from __future__ import annotations

import logging
from typing import Any

import tvm
from tvm import relax, te, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from fx2relax import stages

from .flow import expressions
from .order import sizes_first
from .results import own_results
from .row_groups import join_rows

_log = logging.getLogger(__name__)


def fuse(mod: Any, cpu: Any = None) -> Any:
    """Fuse the `call_tir` kernels of a legalised module; other calls stay as they are.

    Args:
        mod: the module.
        cpu: the target, where kernels that run by the same rows may be one.
    """
    passes = relax.transform
    mod = tvm.transform.Sequential([passes.ConvertToDataflow(), passes.FoldConstant()])(mod)
    mod = own_results(_without_empty_constants(mod))
    stages.note("legal", mod=mod)
    joined = passes.FuseOps()(passes.AnnotateTIROpPattern()(mod))
    joined = joined if cpu is None else join_rows(joined, cpu)
    stages.note("grouped", mod=joined)
    try:
        mod = passes.FuseTIR()(sizes_first(joined))
    except tvm.error.InternalError as error:
        # It takes equal sizes that are written in two ways (n + 1 - 1 and n) for unequal.
        _log.info("the kernels of a graph stay apart: %s", error)
    return passes.DeadCodeElimination()(mod)


def _without_empty_constants(mod: Any) -> Any:
    """Make each constant of no elements by a kernel: an executable that holds one cannot load."""
    if not any(map(_is_empty, expressions(mod))):
        return mod
    rewriter = _MakeEmpty(mod)
    for name, func in list(mod.functions_items()):
        if isinstance(func, relax.Function):
            rewriter.builder_.update_func(name, rewriter.visit_expr(func))
    return rewriter.builder_.get()


def _is_empty(expr: Any) -> bool:
    return isinstance(expr, tvm.ir.GenericConst) and 0 in expr.value.shape


@mutator
class _MakeEmpty(PyExprMutator):  # type: ignore[misc]
    def visit_generic_const_(self, op: Any) -> Any:
        if not _is_empty(op):
            return op
        sizes, dtype = [int(s) for s in op.value.shape], str(op.value.dtype)

        def empty() -> Any:
            return te.compute(sizes, lambda *_: tirx.const(0, dtype), name="empty")

        return self.builder_.emit(self.builder_.call_te(empty))
