"""Several functions in one module, over one list of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from .flow import Added

#: What a module's public function is called before it has a name among others: the kernels of a
#: function ``add`` may be called so too.
UNNAMED = "fx2relax_unnamed"


def merged(modules: Mapping[str, Any]) -> Any:
    """One module of the functions of several; kernels that are equal are kept once.

    Args:
        modules: by the name that each one's public function is to have.
    """
    result = IRModule()
    for name, mod in modules.items():
        renamed = {}
        for var, function in mod.functions_items():
            if var.name_hint != UNNAMED:
                renamed[var] = _placed(result, var, function, set(modules))
        update = _Renamed(renamed)
        for var, function in mod.functions_items():
            if not isinstance(function, relax.Function):
                continue
            made = update.visit_expr(function)
            if var in renamed:
                result[renamed[var]] = made
            else:
                result[relax.GlobalVar(name)] = made.with_attr("global_symbol", name)
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


def with_effects_begun(mod: Any) -> Any:
    """The module with a function that gives what stands for no effects yet."""
    builder = relax.BlockBuilder(mod)
    with builder.function("_initialize_effect", []):
        with builder.dataflow():
            io = builder.emit(relax.op.null_value(), "_io")
            made = builder.emit_output(relax.Tuple([io]))
        builder.emit_func_output(made)
    return builder.get()


def with_own_effects(function: Any) -> Any:
    """A function whose effects begin with it.

    It takes no ``_io``, and returns one flat tuple: its results, then what stands for its effects.
    """
    count = int(function.attrs["num_input"]) - 1
    io, body = function.params[count], function.body
    builder = relax.BlockBuilder()
    bind = Added(builder)
    own = bind("own", relax.TupleGetItem(body.body, 0))
    fields = [own]
    if isinstance(own.ty, relax.TupleType):
        fields = [bind("field", relax.TupleGetItem(own, i)) for i in range(len(own.ty.fields))]
    effects = bind("effects", relax.TupleGetItem(body.body, 1))
    result = bind("result", relax.Tuple([*fields, bind("_io", relax.TupleGetItem(effects, 0))]))
    begun = relax.VarBinding(io, builder.normalize(relax.op.null_value()))
    blocks = [relax.BindingBlock([begun]), *body.blocks, relax.BindingBlock(bind.bindings)]
    params = [p for i, p in enumerate(function.params) if i != count]
    whole = builder.normalize(relax.SeqExpr(blocks, result))
    changed = relax.Function(params, whole, result.ty, function.is_pure)
    return changed.with_attrs({**dict(function.attrs), "num_input": count})


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


def stored_as(function: Any, dtypes: Mapping[str, str]) -> Any:
    """A function that takes weights in other dtypes, and reads them in the ones they had.

    Args:
        function: of a module.
        dtypes: by the name of a weight.
    """
    builder = relax.BlockBuilder()
    params, casts = [], []
    for param in function.params:
        dtype = dtypes.get(str(param.name))
        if dtype is None or str(param.ty.dtype) == dtype:
            params.append(param)
            continue
        stored = relax.Var(param.name, relax.TensorType(param.ty.shape.values, dtype))
        params.append(stored)
        value = builder.normalize(relax.op.astype(stored, param.ty.dtype))
        casts.append(relax.VarBinding(param, value))
    if not casts:
        return function
    body = function.body
    blocks = [relax.DataflowBlock(casts), *body.blocks]
    whole = builder.normalize(relax.SeqExpr(blocks, body.body))
    made = relax.Function(params, whole, function.ret_ty, function.is_pure)
    return made.with_attrs(dict(function.attrs))


def _with_own_sizes(ty: Any, sizes: dict[str, Any]) -> Any:
    """A type whose sizes are the variables of one function: TVM takes none in two of them."""
    if ty.shape is None:
        return ty
    return relax.TensorType([_rebuilt(size, sizes) for size in ty.shape.values], ty.dtype)


def _rebuilt(size: Any, sizes: dict[str, Any]) -> Any:
    if isinstance(size, tirx.Var):
        return sizes.setdefault(str(size.name), tirx.Var(size.name, "int64"))
    if isinstance(size, tirx.IntImm):
        return size
    return type(size)(_rebuilt(size.a, sizes), _rebuilt(size.b, sizes))
