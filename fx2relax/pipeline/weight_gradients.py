"""Gradients of convolutions' weights as calls of PyTorch's own backward kernels.

As operators of Relax they are convolutions with batch and channels swapped, whose windows are as
large as images; no library is made for these, and what lies beside them would be transposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.sym import Analyzer

from .flow import bindings, dtype_of, known, name_of, sizes_of
from .layout import permutation
from .library import CONVOLUTIONS, PREFIX, settings_of

_PERMUTE = "relax.permute_dims"


def use_weight_gradients(mod: Any) -> Any:
    """Call the library for what `converters.convolution` makes of a weight's gradient.

    The calls, of float32 and float64, and of half precision summed in float32:

        conv*d_weight(x, gradient of the output, settings, sizes of the weight) -> gradient

    with the settings that `library` gives to a convolution.

    Args:
        mod: Relax functions in high-level operators and in normal form; it is not changed.

    Returns:
        the module.
    """
    mod = mod.clone()
    for name, func in list(mod.functions_items()):
        if not isinstance(func, relax.Function):
            continue
        found = _Found(func)
        if found.calls:
            mod[name] = relax.analysis.remove_all_unused(_Calls(mod, found).visit_expr(func))
    return mod


class _Found:
    """The weight gradients of a function.

    Attributes:
        calls: by the variable of each, the name of its call, its two operands and its settings.
    """

    def __init__(self, func: Any) -> None:
        self.values: dict[Any, Any] = {b.var: b.value for b in bindings(func)}
        self.calls: dict[Any, tuple[str, list[Any], list[int]]] = {}
        for binding in bindings(func):
            call = self.call(binding.var, binding.value)
            if call is not None:
                self.calls[binding.var] = call

    def call(self, var: Any, value: Any) -> tuple[str, list[Any], list[int]] | None:
        """What computes a variable, if that is the gradient of a weight."""
        whole = self.unswapped(value)
        inner: Any = self.values.get(whole)
        if name_of(inner) == "relax.strided_slice":  # windows that the last stride leaves out
            inner = self.values.get(inner.args[0])
        axes, transposed = CONVOLUTIONS.get(name_of(inner), (0, True))
        settings = None if transposed else settings_of(inner)
        if settings is None or settings[-2] < 1:
            return None
        data, kernel = (self.values.get(x) for x in inner.args[:2])
        gradient = self.unswapped(kernel)
        x = self.ungrouped(data, settings[-2])
        if x is None or gradient is None:
            return None
        # The strides of one are the dilations of the other.
        steps, padding, strides = (settings[n * axes : (n + 1) * axes] for n in range(3))
        plain = [*strides, *padding, *steps, *settings[3 * axes :]]
        sizes = sizes_of(var)
        if sizes is None or not known(sizes):
            return None
        if not _fits(sizes_of(x), sizes_of(gradient), sizes, strides, padding, steps):
            return None
        return f"conv{axes}d_weight", [x, gradient], plain

    def unswapped(self, value: Any) -> Any:
        """What an expression swaps the first two axes of; None if it does not."""
        if name_of(value) != _PERMUTE or sizes_of(value.args[0]) is None:
            return None
        axes = permutation(value)
        return value.args[0] if axes == (1, 0, *range(2, len(axes))) else None

    def ungrouped(self, value: Any, groups: int) -> Any:
        """The tensor (n, c, ...) behind one of (c / groups, groups * n, ...)."""
        if groups == 1:
            return self.unswapped(value)
        if name_of(value) != "relax.reshape":
            return None
        turned: Any = self.values.get(value.args[0])
        if name_of(turned) != _PERMUTE:
            return None
        split: Any = self.values.get(turned.args[0])
        if name_of(split) != "relax.reshape":
            return None
        x, axes = split.args[0], permutation(turned)
        whole, parts, joined = (sizes_of(v) for v in (x, turned.args[0], value))
        if whole is None or parts is None or joined is None or parts[1] != groups:
            return None
        if axes != (2, 1, 0, *range(3, len(parts))) or len({*map(len, (whole, joined))}) > 1:
            return None
        spaces = zip(whole[2:], parts[3:], joined[2:], strict=True)
        same = all(_equal(a, b) and _equal(b, c) for a, b, c in spaces)
        return x if same and _equal(whole[0], parts[0]) and _equal(parts[2], joined[0]) else None


def _fits(
    x: Any,
    gradient: Any,
    weight: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[int],
    steps: Sequence[int],
) -> bool:
    """Whether a convolution of `x` with such a weight has an output of the gradient's sizes."""
    if x is None or gradient is None:
        return False
    for n, stride in enumerate(strides):
        reach = steps[n] * (weight[n + 2] - 1) + 1
        size = (x[n + 2] + 2 * padding[n] - reach) // stride + 1
        if not _equal(size, gradient[n + 2]):
            return False
    return _equal(x[0], gradient[0]) and _equal(gradient[1], weight[0])


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(Analyzer().can_prove_equal(a, b))


@mutator
class _Calls(PyExprMutator):  # type: ignore[misc]
    """Puts the calls in their places."""

    def __init__(self, mod: Any, found: _Found) -> None:
        super().__init__(mod)
        self.found = found

    def visit_var_binding_(self, binding: Any) -> None:
        """A library call where one is known."""
        if binding.var in self.found.calls:
            name, operands, settings = self.found.calls[binding.var]
            sizes = sizes_of(binding.var)
            arguments = [self.visit_expr(x) for x in operands]
            arguments += [relax.ShapeExpr(settings), relax.ShapeExpr(sizes)]
            value = relax.call_dps_packed(
                PREFIX + name,
                relax.Tuple(arguments),
                out_ty=relax.TensorType(sizes, dtype_of(binding.var)),
            )
            binding = relax.VarBinding(binding.var, value)
        super().visit_var_binding_(binding)
