"""A convolution net with its channels last, where `layout` finds that this pays.

Results and parameters of a function stay as they are: what changes lies between them. Weights
that a kernel reads beside such tensors are permuted as work on weights alone, for `lift`.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm_ffi import structural_equal, structural_hash

from .flow import Flow, bindings, dtype_of, name_of, sizes_of
from .layout import (
    CONVOLUTION,
    LAST,
    Plan,
    is_convolution,
    orders,
    permutation,
    plan,
    reads_as_is,
)
from .legalize import rule_of
from .permuted import Order, inverse
from .repeats import Repeats

_op = relax.op
# Kept in one piece: a layout changes what they are, not only how they are computed.
_KEPT = ("relax.reshape", "relax.permute_dims", "relax.concat")


def use_channels_last(mod: Any) -> Any:
    """Lay tensors between library convolutions of two axes out with their channels last.

    Args:
        mod: Relax functions in normal form after `use_library`, weights right of ``num_input``;
            it is not changed.

    Returns:
        the module; a function in which nothing is gained is the same.
    """
    for name, func in list(mod.functions_items()):
        if not isinstance(func, relax.Function):
            continue
        if not any(is_convolution(binding.value) for binding in bindings(func)):
            continue
        legal = _Legal(mod, Flow(func)).rewritten(name, func)
        flow = Flow(legal[name])
        chosen = plan(flow, legal)
        if chosen.moves:
            mod = _Relaid(legal, flow, chosen).rewritten(name, legal[name])
    return mod


class _Rewriter(PyExprMutator):  # type: ignore[misc]
    def rewritten(self, name: Any, func: Any) -> Any:
        """The module with one function rewritten, and the kernels that this made."""
        func = relax.analysis.remove_all_unused(self.visit_expr(func))
        self.builder_.update_func(name, func)
        return self.builder_.get()


@mutator
class _Legal(_Rewriter):
    """Operators on tensors with axes of space as calls of kernels, apart from work on weights."""

    def __init__(self, mod: Any, flow: Flow) -> None:
        super().__init__(mod)
        self.flow = flow
        self.repeats = Repeats()

    def visit_var_binding_(self, binding: Any) -> None:
        """Put a kernel in the place of an operator that has one."""
        rule = self.rule(binding)
        if rule is not None:
            call = self.builder_.normalize(self.visit_expr_post_order(binding.value))
            binding = relax.VarBinding(binding.var, self.repeats.once(rule)(self.builder_, call))
        super().visit_var_binding_(binding)

    def rule(self, binding: Any) -> Any:
        """What makes a kernel of a binding's value, if it is to be one."""
        value = binding.value
        name = name_of(value)
        if not name or name in _KEPT or binding.var in self.flow.weights:
            return None
        tensors = [a for a in value.args if dtype_of(a)]
        if any(sizes_of(x) is None for x in (binding.var, *tensors)):
            return None
        return rule_of(name) if any(len(sizes_of(x) or ()) > 2 for x in tensors) else None


@mutator
class _Relaid(_Rewriter):
    """Gives the variables of a function the labels of a plan."""

    def __init__(self, mod: Any, flow: Flow, chosen: Plan) -> None:
        super().__init__(mod)
        self.flow = flow
        self.plan = chosen
        # A variable as it lies with label 0 and with label 1; a weight in an order of axes.
        self.laid: dict[tuple[Any, Any], Any] = {}
        self.alike: dict[int, list[tuple[Any, Any]]] = {}

    def visit_var_binding_(self, binding: Any) -> None:
        """Emit a binding in its layout; those without one read plain tensors."""
        var, value = binding.var, binding.value
        kind = self.plan.kinds.get(var)
        label = int(var in self.plan.last)
        if kind is not None and (label or self.touched(value)):
            result, given = getattr(self, kind)(var, value, label)
            result = self.builder_.emit(result, var.name)
            self.laid[var, given] = result
            if not label:
                self.set_var_remap(var, self.read(var, 0) if given else result)
            return
        for operand in relax.analysis.free_vars(value):
            if operand in self.plan.last:
                self.set_var_remap(operand, self.read(operand, 0))
        super().visit_var_binding_(binding)

    def touched(self, value: Any) -> bool:
        """Whether a plain result is computed from anything that is not plain, or may be."""
        return any(v in self.plan.last for v in relax.analysis.free_vars(value)) or (
            is_convolution(value)
        )

    def read(self, var: Any, label: int) -> Any:
        """A variable as it lies with a label; it is transposed at most once."""
        rank = len(sizes_of(var) or ())
        if rank not in LAST:
            return self.visit_expr(var)
        if (var, label) not in self.laid:
            if (var, 1 - label) not in self.laid:
                self.laid[var, 0] = self.visit_expr(var)
                return self.read(var, label)
            axes = LAST[rank] if label else inverse(LAST[rank])
            self.laid[var, label] = self.moved(self.laid[var, 1 - label], axes)
        return self.laid[var, label]

    def moved(self, x: Any, axes: Order) -> Any:
        """A transposition, as a reshape where it moves axes of size 1 alone."""
        sizes = sizes_of(x) or []
        long = [axis for axis in axes if sizes[axis] != 1]
        if long == sorted(long) and 0 not in sizes:
            return self.builder_.emit(_op.reshape(x, [sizes[axis] for axis in axes]))
        return self.builder_.emit(_op.permute_dims(x, list(axes)))

    def weight(self, operand: Any, order: Order | None) -> Any:
        """A weight in an order of axes."""
        if order is None:
            return self.visit_expr(operand)
        if isinstance(operand, tvm.ir.GenericConst):
            return self.moved(operand, order)
        if (operand, order) not in self.laid:
            self.laid[operand, order] = self.moved(self.visit_expr(operand), order)
        return self.laid[operand, order]

    # Each of these gives an expression, and the label of what it computes.

    def conv(self, var: Any, value: Any, label: int) -> tuple[Any, int]:
        """A library call on tensors of one layout."""
        last = int(var in self.plan.moves)
        name, (x, *rest) = CONVOLUTION, value.args[1].fields
        sizes = sizes_of(var) or []
        if last:
            name += "_nhwc"
            sizes = [sizes[axis] for axis in LAST[4]]
        kernel, *others = rest
        arguments = [self.read(x, last), self.weight(kernel, LAST[4] if last else None)]
        arguments += [self.visit_expr(r) for r in others]
        ty = relax.TensorType(sizes, dtype_of(value))
        return relax.call_dps_packed(name, relax.Tuple(arguments), out_ty=ty), last

    def kernel(self, var: Any, value: Any, label: int) -> tuple[Any, int]:
        """A kernel that reads and writes one layout, or sums over space as it lies."""
        gvar, operands = value.args[0], list(value.args[1].fields)
        func = self.plan.kernels.mod[gvar]
        as_is = set()
        if not label and reads_as_is(value, func):
            as_is = {x for x in operands if isinstance(x, relax.Var) and x in self.plan.last}
            if self.plan.kernels.get(gvar, orders(value, 0, self.flow, as_is)) is None:
                as_is = set()
        chosen = orders(value, label, self.flow, as_is)
        arguments = []
        for operand, order in zip(operands, chosen, strict=False):
            if self.flow.on_weights(operand):
                arguments.append(self.weight(operand, order))
            elif isinstance(operand, relax.Var):
                arguments.append(self.read(operand, int(label or operand in as_is)))
            else:
                arguments.append(self.visit_expr(operand))
        sizes = sizes_of(var) or []
        if label:
            sizes = [sizes[axis] for axis in LAST[len(sizes)]]
        if any(order is not None for order in chosen):
            gvar = self.added(self.plan.kernels.get(gvar, chosen), gvar.name_hint)
        ty = relax.TensorType(sizes, dtype_of(value))
        return relax.call_tir(gvar, relax.Tuple(arguments), ty), label

    def added(self, func: Any, name: str) -> Any:
        """A kernel of the module; one that is there already serves again."""
        alike = self.alike.setdefault(structural_hash(func), [])
        for other, gvar in alike:
            if structural_equal(other, func):
                return gvar
        gvar = self.builder_.add_func(func, name)
        alike.append((func, gvar))
        return gvar

    def reshape(self, var: Any, value: Any, label: int) -> tuple[Any, int]:
        """The same memory in other sizes."""
        sizes = sizes_of(var) or []
        if label:
            sizes = [sizes[axis] for axis in LAST[len(sizes)]]
        return _op.reshape(self.read(value.args[0], label), sizes), label

    def permute(self, var: Any, value: Any, label: int) -> tuple[Any, int]:
        """A transposition of the memory as it lies; none where that gives the result."""
        x, axes = value.args[0], permutation(value)
        mine = int(isinstance(x, relax.Var) and x in self.plan.last)
        # Memory order -> axes of `x` -> axes of the result -> its memory order.
        before = LAST[len(axes)] if mine else tuple(range(len(axes)))
        after = LAST[len(axes)] if label else tuple(range(len(axes)))
        place = inverse(before)
        whole = tuple(place[axes[axis]] for axis in after)
        source = self.read(x, mine) if isinstance(x, relax.Var) else self.visit_expr(x)
        if whole == tuple(range(len(axes))):
            return source, label
        return _op.permute_dims(source, list(whole)), label

    def concat(self, var: Any, value: Any, label: int) -> tuple[Any, int]:
        """Tensors joined along the axis where it lies."""
        fields = value.args[0].fields
        if not label:
            parts = [self.read(x, 0) if self.is_var(x) else self.visit_expr(x) for x in fields]
            return _op.concat(relax.Tuple(parts), value.attrs.axis), 0
        rank = len(sizes_of(var) or ())
        parts = [
            self.weight(x, LAST[rank]) if self.flow.on_weights(x) else self.read(x, 1)
            for x in fields
        ]
        axis = LAST[rank].index(int(value.attrs.axis) % rank)
        return _op.concat(relax.Tuple(parts), axis), 1

    def is_var(self, x: Any) -> bool:
        """Whether an operand is a variable that may have been laid out."""
        return isinstance(x, relax.Var) and not self.flow.on_weights(x)
