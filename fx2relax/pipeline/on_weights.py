"""Arithmetic on weights alone as calls of PyTorch's kernels.

It is done once, so that a kernel of our own for each size takes longer to compile than all its
calls take: of EfficientNet's 111 kernels, 60 made weights.
"""

from __future__ import annotations

from typing import Any

from tvm import relax
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..runtime.on_weights import PREFIX
from .flow import Flow, bindings, dtype_of, known, name_of, sizes_of
from .layout import permutation
from .lift import is_transform

_FLOATS = ("float32", "float64", "float16", "bfloat16")
_CAST = "relax.astype"
_FUNCTIONS = {
    **{f"relax.{name}": name for name in ("add", "subtract", "multiply", "divide")},
    "relax.negative": "negative",
    "relax.sqrt": "sqrt",
    "relax.broadcast_to": "copy",
    _CAST: "copy",
    "relax.permute_dims": "permute",
}


def use_library_on_weights(mod: Any) -> Any:
    """Let PyTorch compute what it can of the transforms of weights.

    Args:
        mod: what `lift` returned; it is not changed.

    Returns:
        the module with its transforms changed; each call rounds as the operator that it stands
        for.
    """
    mod = mod.clone()
    for name, func in list(mod.functions_items()):
        if isinstance(func, relax.Function) and is_transform(name.name_hint, func):
            mod[name] = relax.analysis.remove_all_unused(_Calls(mod, Flow(func)).visit_expr(func))
    return mod


def shortened(mod: Any) -> tuple[Any, IRModule]:
    """Spare the passes that make kernels the transforms in which there are none to be made.

    Args:
        mod: what `use_library_on_weights` returned; it is not changed.

    Returns:
        the module with such transforms returning what they are given, and those transforms, to be
        put back before memory is planned.
    """
    finished = {
        name: func
        for name, func in mod.functions_items()
        if isinstance(func, relax.Function)
        and is_transform(name.name_hint, func)
        and all(_has_no_kernel(binding.value) for binding in bindings(func))
    }
    if finished:
        mod = mod.clone()
        for name, func in finished.items():
            given = relax.Tuple(list(func.params))
            body = relax.SeqExpr([], given)
            mod[name] = relax.Function(func.params, body, given.ty, attrs=func.attrs)
    return mod, IRModule(finished)


def _has_no_kernel(value: Any) -> bool:
    """Whether a value is a part of another, a view or a packed function's."""
    if name_of(value) == "relax.reshape":
        return _has_elements(value)
    parts = (relax.TupleGetItem, relax.Tuple, relax.Var)
    return isinstance(value, parts) or name_of(value) == "relax.call_dps_packed"


def _has_elements(reshaped: Any) -> bool:
    """Whether a tensor has no size of 0, which Relax's reshape reads otherwise."""
    return 0 not in (sizes_of(reshaped) or ())


@mutator
class _Calls(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: Any, flow: Flow) -> None:
        super().__init__(mod)
        self.flow = flow

    def visit_call_(self, call: Any) -> Any:
        """A call of PyTorch's in the place of an operator."""
        function = _FUNCTIONS.get(name_of(call))
        operands = [x for x in call.args if dtype_of(x)]
        if name_of(call) == "relax.reshape" and _has_elements(call):
            before = self.visit_expr(self._before_reshapes(call.args[0]))
            return relax.op.reshape(before, self.visit_expr(call.args[1]))
        if function is None or not _is_known(call, operands):
            return self.visit_expr_post_order(call)
        if function == "permute":
            settings = [list(permutation(call))]
        else:
            settings = [list(x.ty.shape.values) for x in operands]
            operands = [self._before_reshapes(x) for x in operands]
        given = [*map(self.visit_expr, operands), *map(relax.ShapeExpr, settings)]
        return relax.call_dps_packed(PREFIX + function, relax.Tuple(given), out_ty=call.ty)

    def _before_reshapes(self, x: Any) -> Any:
        """What has the numbers of a tensor in the same order: PyTorch is told how to read it."""
        while isinstance(x, relax.Var):
            value: Any = self.flow.values.get(x)
            if name_of(value) != "relax.reshape":
                break
            x = value.args[0]
        return x


def _is_known(call: Any, operands: list[Any]) -> bool:
    """Whether a call is of tensors of floating point whose sizes are numbers."""
    kinds = {dtype_of(x) for x in (call, *operands)}
    sizes = [sizes_of(x) for x in (call, *operands)]
    if not kinds <= set(_FLOATS) or (len(kinds) > 1 and name_of(call) != _CAST):
        return False
    return all(s is not None and known(s) for s in sizes)
