"""Generated kernels out of the way of the symbols of a user's objects in the same library."""

from __future__ import annotations

from typing import Any

from tvm import relax, tirx
from tvm.ir import GlobalVar
from tvm.relax.expr_functor import PyExprMutator, mutator

from fx2relax import objects


def with_names_apart(mod: Any) -> Any:
    """Rename the kernels of a module that are called as a function of an object it carries is."""
    files = objects.held(mod)
    if not files:
        return mod
    taken = {name for file in files for name in file.symbols.functions}
    names = {var.name_hint for var in mod.get_global_vars()}
    renamed: dict[Any, Any] = {}
    for var, function in list(mod.functions_items()):
        if isinstance(function, tirx.PrimFunc) and var.name_hint in taken:
            count = 1
            while (name := f"{var.name_hint}_{count}") in taken | names:
                count += 1
            names.add(name)
            renamed[var] = GlobalVar(name)
            relax.expr._update_type(renamed[var], var.ty)
    return _Renamer(mod, renamed).module() if renamed else mod


@mutator
class _Renamer(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: Any, renamed: dict[Any, Any]) -> None:
        super().__init__()
        self.mod, self.renamed = mod.clone(), renamed

    def module(self) -> Any:
        for var, function in list(self.mod.functions_items()):
            if var in self.renamed:
                del self.mod[var]
                symbol = self.renamed[var].name_hint
                self.mod[self.renamed[var]] = function.with_attr("global_symbol", symbol)
            elif isinstance(function, relax.Function):
                self.mod[var] = self.visit_expr(function)
        return self.mod

    def visit_global_var_(self, op: Any) -> Any:
        """The kernel under its other name."""
        return self.renamed.get(op, op)
