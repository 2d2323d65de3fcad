"""Work on weights alone moves out of a function, to be done once.

`LiftTransformParams` does the moving; here is what has to happen around it so that it finds
everything worth lifting and nothing else.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import relax
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from fx2relax.compat import Expr, TensorType, Var, is_prim_expr, op, shape_values, type_of

from .flow import CALLBACKS, known

#: The attribute of a kernel whose result is to be lifted though it may be larger than a weight.
PACKS = "fx2relax.packs"
#: What `LiftTransformParams` adds to a function's name for the transform of its weights.
TRANSFORM = "_transform_params"
#: The name of a transform of the weights of several functions.
SHARED = "transform_params"
#: The attribute of a transform: the names of the functions whose weights it makes.
TRANSFORMS = "fx2relax.transforms"
# What a transform is called to which another one was added.
_FIRST = "_first_transform"


def lift(mod: Any) -> Any:
    """Split each function with `num_input` into itself and ``<name>_transform_params``.

    A function of which nothing can be lifted keeps its parameters. Work whose result is much
    larger than the weights it comes from (a broadcast) stays: it costs memory and saves nothing,
    since it fuses with its consumer.

    Args:
        mod: Relax functions in normal form, weights right of ``num_input``.

    Returns:
        the module, with a transform function (one tuple of weights in, one tuple out) for each
        function that gave something up; the function then takes the transform's results.
    """
    mod = relax.transform.CanonicalizeBindings()(_set_aside(mod))
    mod = relax.transform.EliminateCommonSubexpr()(mod)
    held = IRModule(dict(mod.functions_items()))
    lifted_any = False
    for name, function in mod.functions_items():
        if isinstance(function, relax.Function) and _has_weights(function):
            found = _Holder(mod, function)
            held[name] = found.hold()
            lifted_any = lifted_any or found.lifts
    if lifted_any:
        alone = [n.name_hint for n, f in mod.functions_items() if _of_weights_alone(f)]
        for name in alone:
            held[name] = held[name].without_attr("num_input")
        mod = relax.transform.LiftTransformParams()(held)
        mod = relax.transform.DeadCodeElimination()(mod)
        for name in alone:
            mod[name] = mod[name].with_attr("num_input", 0)
    return _called_again(mod)


def is_transform(name: str, function: Any) -> bool:
    """Whether a function makes weights for others."""
    attrs = function.attrs
    return name.endswith(TRANSFORM) or (attrs is not None and TRANSFORMS in attrs)


def without_transforms(mod: Any) -> Any:
    """Let nothing take the transforms that a module has already for functions with weights."""
    marked = {
        name: function
        for name, function in mod.functions_items()
        if isinstance(function, relax.Function)
        and function.attrs is not None
        and TRANSFORMS in function.attrs
        and "num_input" in function.attrs
    }
    if marked:
        mod = mod.clone()
        for name, function in marked.items():
            mod[name] = function.without_attr("num_input")
    return mod


def _set_aside(mod: Any) -> Any:
    """Another name for each transform whose own one a further transform may need."""
    return _renamed(mod, TRANSFORM, _FIRST)


def _called_again(mod: Any) -> Any:
    """The old name of each transform to which no other was added."""
    return _renamed(mod, _FIRST, TRANSFORM)


def _renamed(mod: Any, ending: str, other: str) -> Any:
    names = {name.name_hint for name in mod.get_global_vars()}
    for name, function in list(mod.functions_items()):
        hint = name.name_hint
        if not isinstance(function, relax.Function) or not hint.endswith(ending):
            continue
        new = hint.removesuffix(ending) + other
        if function.attrs is not None and TRANSFORMS in function.attrs and new not in names:
            mod = mod.clone()
            del mod[hint]
            mod[new] = function.with_attr("global_symbol", new)
    return mod


def _has_weights(function: Any) -> bool:
    attrs = function.attrs
    if attrs is None or "num_input" not in attrs:
        return False
    return 0 < int(attrs["num_input"]) < len(function.params)


def _of_weights_alone(function: Any) -> bool:
    """Whether a function takes nothing but weights: `LiftTransformParams` would leave nothing."""
    attrs = getattr(function, "attrs", None)
    return attrs is not None and "num_input" in attrs and not int(attrs["num_input"])


@mutator
class _Holder(PyExprMutator):  # type: ignore[misc]
    """Marks what must not be lifted, and finds whether anything else is left to lift."""

    def __init__(self, mod: Any, function: Any) -> None:
        super().__init__()
        self.mod, self.function = mod, function
        self.weights: set[Any] = set(function.params[int(function.attrs["num_input"]) :])
        self.given: set[Any] = set(function.params[: int(function.attrs["num_input"])])
        self.lifts = False

    def hold(self) -> Any:
        """The function with its held work marked."""
        return self.visit_expr(self.function)

    def visit_var_binding_(self, binding: Any) -> None:
        """Follow which variables depend on weights alone."""
        value = binding.value
        if self._given(value):
            self.given.add(binding.var)
        elif not isinstance(binding.var, relax.DataflowVar):
            binding = relax.VarBinding(binding.var, self._kept_result(value))
        elif isinstance(value, relax.Call) and self._on_weights(value):
            if not _operands(value):
                self.weights.add(binding.var)  # lifted where what uses it is
            elif self._pays(binding.var, value):
                self.weights.add(binding.var)
                self.lifts = True
            elif any(isinstance(a, Var) for a in value.args):
                binding = relax.VarBinding(binding.var, self._held(value))
            else:  # operands in a tuple, as a kernel's, are not held: it is lifted with the rest
                self.weights.add(binding.var)
        super().visit_var_binding_(binding)

    def _given(self, value: Any) -> bool:
        """Whether a value depends on what the function is called with."""
        return any(v in self.given for v in relax.analysis.free_vars(value))

    def _kept_result(self, value: Any) -> Any:
        """A result that can be lifted whole, held: `LiftTransformParams` loses it otherwise."""
        if isinstance(value, relax.Tuple):
            return relax.Tuple([self._kept_result(field) for field in value.fields])
        return self._held(value) if isinstance(value, relax.Call) else _stopped(value, self.weights)

    def _on_weights(self, call: Any) -> bool:
        return all(v in self.weights for v in _operands(call))

    def _pays(self, var: Any, call: Any) -> bool:
        if getattr(call.op, "name", "") in CALLBACKS:
            return False
        result = _count(type_of(var))
        if result is None:
            return False
        if self._packs(call):
            return True
        sources = [a for a in _leaves(call.args) if isinstance(a, Var)]
        given = sum(_count(type_of(a)) or 0 for a in sources)
        return result <= max(given, 1)

    def _packs(self, call: Any) -> bool:
        """Whether a kernel writes a weight as another kernel reads it, some zeros added."""
        kernel = call.args[0] if call.args else None
        if not isinstance(kernel, tvm.ir.GlobalVar):
            return False
        attrs = self.mod[kernel].attrs
        return attrs is not None and PACKS in attrs

    def _held(self, call: Any) -> Any:
        args = [_stopped(a, self.weights) for a in call.args]
        return relax.Call(call.op, args, call.attrs, call.ty_args)


def _stopped(value: Any, weights: set[Any]) -> Any:
    on_weights = isinstance(value, Var) and value in weights
    return op.builtin.stop_lift_params(value) if on_weights else value


def _operands(call: Any) -> list[Any]:
    """The variables among a call's tensors."""
    tensors = [a for a in call.args if isinstance(a, Expr) and not is_prim_expr(a)]
    return [a for a in _leaves(tensors) if isinstance(a, Var)]


def _leaves(args: Any) -> list[Any]:
    found: list[Any] = []
    for arg in args:
        if isinstance(arg, relax.Tuple):
            found.extend(_leaves(arg.fields))
        else:
            found.append(arg)
    return found


def _count(ty: Any) -> int | None:
    """How many elements a tensor has; None if that is not known before the call."""
    if not isinstance(ty, TensorType):
        return None
    sizes = shape_values(ty)
    if sizes is None or not known(sizes):
        return None
    return int(math.prod(sizes))
