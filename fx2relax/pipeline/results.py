"""Results that are the caller's own.

A constant that a function returns, or a parameter, is the same memory in every call: whoever
writes to one result would find it in the next.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, te
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..compat import TensorType, Var, type_of
from .lift import is_transform


def own_results(mod: Any) -> Any:
    """Copy what a function returns and has not computed; transforms of weights keep theirs."""
    rewriter = _Owner(mod)
    for name, function in list(mod.functions_items()):
        if not isinstance(function, relax.Function) or is_transform(name.name_hint, function):
            continue
        rewriter.builder_.update_func(name, rewriter.own(function))
    return rewriter.builder_.get()


@mutator
class _Owner(PyExprMutator):  # type: ignore[misc]
    def own(self, function: Any) -> Any:
        """The function with copies in its result."""
        self.borrowed = set(function.params)
        self.result = function.body.body
        return self.visit_expr(function)

    def visit_var_binding_(self, binding: Any) -> None:
        """Follow borrowed values; copy them where they are returned."""
        var, value = binding.var, binding.value
        if var.same_as(self.result):
            binding = relax.VarBinding(var, self._owned(value))
        elif self._is_borrowed(value):
            self.borrowed.add(var)
        super().visit_var_binding_(binding)

    def _is_borrowed(self, value: Any) -> bool:
        if isinstance(value, Var):
            return value in self.borrowed
        return isinstance(value, tvm.ir.GenericConst)

    def _owned(self, value: Any) -> Any:
        if isinstance(value, relax.Tuple):
            return relax.Tuple([self._owned(field) for field in value.fields])
        if not self._is_borrowed(value) or not isinstance(type_of(value), TensorType):
            return value
        return self.builder_.call_te(_copy, relax.const(0, "bool"), self.visit_expr(value))


def _copy(_: Any, x: Any) -> Any:
    """A kernel of one argument that moves elements becomes a view, which copies nothing."""
    return te.compute(x.shape, lambda *i: x(*i), name="copy")
