"""Transposes of transposes: one, or none at all."""

from __future__ import annotations

from typing import Any

from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from .flow import name_of, sizes_of
from .layout import permutation


def join_transposes(mod: Any) -> Any:
    """Make one transpose of two, the one after the other; two that undo each other are gone.

    Args:
        mod: Relax functions in normal form; it is not changed.
    """
    mod = mod.clone()
    for name, func in list(mod.functions_items()):
        if isinstance(func, relax.Function):
            mod[name] = _Joined(mod).visit_expr(func)
    passes = relax.transform
    return passes.DeadCodeElimination()(passes.CanonicalizeBindings()(mod))


@mutator
class _Joined(PyExprMutator):  # type: ignore[misc]
    def visit_call_(self, call: Any) -> Any:
        """A transpose of what another one is the transpose of."""
        call = self.visit_expr_post_order(call)
        if name_of(call) != "relax.permute_dims" or sizes_of(call.args[0]) is None:
            return call
        inner = call.args[0]
        first: Any = self.lookup_binding(inner) if isinstance(inner, relax.Var) else None
        if name_of(first) != "relax.permute_dims":
            return call
        before = permutation(first)
        whole = [before[axis] for axis in permutation(call)]
        source = first.args[0]
        return source if whole == sorted(whole) else relax.op.permute_dims(source, whole)
