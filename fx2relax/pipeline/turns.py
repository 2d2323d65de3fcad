"""Transpositions of transpositions as one, or as none.

A linear layer's backward pass reads the transpose of a weight's transpose, and gives the transpose
of its gradient's. Library products and kernels look through one transposition alone, so that two
would be two copies.
"""

from __future__ import annotations

from typing import Any

from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from .flow import bindings, name_of, sizes_of
from .layout import permutation

_PERMUTE = "relax.permute_dims"


def join_turns(mod: Any) -> Any:
    """Compose the transpositions of each function that follow one another.

    Args:
        mod: Relax functions in normal form; it is not changed.

    Returns:
        the module.
    """
    mod = mod.clone()
    for name, func in list(mod.functions_items()):
        if isinstance(func, relax.Function) and any(_turns(b.value) for b in bindings(func)):
            mod[name] = relax.analysis.remove_all_unused(_Joined(mod).visit_expr(func))
    return mod


def _turns(value: Any) -> bool:
    return name_of(value) == _PERMUTE and sizes_of(value.args[0]) is not None


@mutator
class _Joined(PyExprMutator):  # type: ignore[misc]
    """Rewrites one function."""

    def visit_var_binding_(self, binding: Any) -> None:
        """Read what the first of two transpositions reads; nothing is left of their identity."""
        if not _turns(binding.value):
            super().visit_var_binding_(binding)
            return
        source, axes = self.visit_expr(binding.value.args[0]), permutation(binding.value)
        inner = self.lookup_binding(source) if isinstance(source, relax.Var) else None
        if inner is not None and _turns(inner):
            order = permutation(inner)
            source, axes = inner.args[0], tuple(order[axis] for axis in axes)
        same = list(axes) == list(range(len(axes)))
        if same and isinstance(binding.var, relax.DataflowVar) and isinstance(source, relax.Var):
            self.set_var_remap(binding.var, source)
            return
        value = source if same else relax.op.permute_dims(source, list(axes))
        super().visit_var_binding_(relax.VarBinding(binding.var, value))
