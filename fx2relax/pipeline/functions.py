"""Several functions in one module, over one list of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator


def merged(modules: Mapping[str, Any]) -> Any:
    """One module of the functions of several; kernels that are equal are kept once.

    Args:
        modules: by the name of the public function that each was made for.
    """
    result = IRModule()
    for name, mod in modules.items():
        renamed = {}
        for var, function in mod.functions_items():
            if isinstance(function, tirx.PrimFunc) or var.name_hint != name:
                renamed[var] = _placed(result, var, function, set(modules))
        update = _Renamed(renamed)
        for var, function in mod.functions_items():
            if isinstance(function, relax.Function):
                place = renamed.get(var) or relax.GlobalVar(name)
                result[place] = update.visit_expr(function)
    return result


def _placed(result: Any, var: Any, function: Any, taken: set[str]) -> Any:
    """Under which name a function is in the merged module, which has it from now on."""
    known = {v.name_hint: v for v, _ in result.functions_items()}
    name, count = var.name_hint, 0
    while True:
        if name in known and tvm_ffi.structural_equal(result[known[name]], function):
            return known[name]
        if name not in known and name not in taken:
            break
        count += 1
        name = f"{var.name_hint}_{count}"
    place = relax.GlobalVar(name)
    relax.expr._update_type(place, var.ty)
    result[place] = function
    return place


@mutator
class _Renamed(PyExprMutator):  # type: ignore[misc]
    """Calls functions by their names in the merged module."""

    def __init__(self, names: Mapping[Any, Any]) -> None:
        super().__init__()
        self.names = names

    def visit_global_var_(self, var: Any) -> Any:
        return self.names.get(var, var)


def with_weights(function: Any, count: int, names: Sequence[str], types: Mapping[str, Any]) -> Any:
    """A function that takes weights which it does not read as well.

    Args:
        function: its own weights stand right of the first `count` parameters.
        count: how many parameters are not weights.
        names: of all weights, in order.
        types: of those that the function may not have.
    """
    own = {str(p.name): p for p in function.params[count:]}
    sizes = {str(v.name): v for v in relax.analysis.defined_symbolic_vars(function)}
    params = [
        own[name] if name in own else relax.Var(name, _with_own_sizes(types[name], sizes))
        for name in names
    ]
    attrs = dict(function.attrs) if function.attrs is not None else {}
    made = relax.Function(
        [*function.params[:count], *params], function.body, function.ret_ty, function.is_pure
    )
    for key, value in attrs.items():
        made = made.with_attr(key, value)
    return made.with_attr("num_input", tvm.runtime.convert(count))


def _with_own_sizes(ty: Any, sizes: dict[str, Any]) -> Any:
    """A type whose sizes are the variables of one function: TVM takes none in two of them."""
    if ty.shape is None:
        return ty
    found = {v for size in ty.shape.values for v in tirx.analysis.undefined_vars(size)}
    own = {v: sizes.setdefault(str(v.name), tirx.Var(v.name, "int64")) for v in found}
    values = [tirx.stmt_functor.substitute(size, own) for size in ty.shape.values]
    return relax.TensorType(values, ty.dtype)
