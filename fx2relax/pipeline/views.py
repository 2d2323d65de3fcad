"""Reshapes that stand alone: the same memory, also where sizes are symbols.

TVM finds such kernels by proving that each element stays in its place, which it cannot where
several sizes are symbols; then whole tensors would be copied.
"""

from __future__ import annotations

from typing import Any

from tvm import relax, topi
from tvm.relax.expr_functor import PyExprMutator, mutator

from .flow import name_of, sizes_of

#: A kernel's attribute: it copies its argument, in its order, to another shape.
VIEW = "fx2relax.view"


def reshaped(builder: Any, call: Any) -> Any:
    """What `legalize` makes of ``R.reshape``."""
    x, shape = call.args
    sizes = shape.values if isinstance(shape, relax.ShapeExpr) else sizes_of(call)
    return builder.call_te(
        topi.reshape, x, sizes, primfunc_name_hint="reshape", primfunc_attrs={VIEW: 1}
    )


def use_views(mod: Any) -> Any:
    """Put ``R.reshape``, a view to the virtual machine, in the place of such kernels."""
    rewriter = _Views(mod)
    for name, func in list(mod.functions_items()):
        if isinstance(func, relax.Function):
            rewriter.builder_.update_func(name, rewriter.visit_expr(func))
    return rewriter.builder_.get()


@mutator
class _Views(PyExprMutator):  # type: ignore[misc]
    """Rewrites the calls of a module's functions."""

    def __init__(self, mod: Any) -> None:
        super().__init__(mod)
        self.mod = mod

    def visit_call_(self, call: Any) -> Any:
        """A view in the place of a copy."""
        if name_of(call) == "relax.call_tir" and len(call.args[1].fields) == 1:
            attrs = self.mod[call.args[0]].attrs
            sizes = sizes_of(call)
            if attrs is not None and VIEW in attrs and sizes is not None:
                return relax.op.reshape(call.args[1].fields[0], relax.ShapeExpr(sizes))
        return self.visit_expr_post_order(call)
