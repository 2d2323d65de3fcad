"""Where the variables of a Relax function come from, who reads them, and which are weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tvm
from tvm import relax

# Callbacks into PyTorch may draw random numbers or have effects: never done once for many calls.
CALLBACKS = ("relax.call_pure_packed", "relax.call_inplace_packed")


class Added:
    """Bindings that a pass writes by hand, behind one another.

    Attributes:
        bindings: so far.
    """

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self.bindings: list[Any] = []

    def __call__(self, name: str, value: Any) -> Any:
        """A variable for an expression."""
        value = self._builder.normalize(value)
        var = relax.Var(name, value.ty)
        self.bindings.append(relax.VarBinding(var, value))
        return var


class Flow:
    """The bindings of one function.

    Attributes:
        values: each bound variable's expression.
        readers: the expressions that read a variable; None stands for the function's result.
        weights: variables that depend on nothing but the parameters right of ``num_input``.
    """

    def __init__(self, func: Any) -> None:
        self.func = func
        self.values: dict[Any, Any] = {}
        self.readers: dict[Any, list[Any]] = {}
        self.weights: set[Any] = set()
        count = func.attrs.get("num_input") if func.attrs is not None else None
        if count is not None:
            self.weights.update(func.params[int(count) :])
        self._given = set(func.params) - self.weights
        for binding in bindings(func):
            self._read(binding)
        for var in relax.analysis.free_vars(result_of(func)):
            self.readers.setdefault(var, []).append(None)

    def _read(self, binding: Any) -> None:
        value, var = binding.value, binding.var
        self.values[var] = value
        free = relax.analysis.free_vars(value)
        for used in free:
            self.readers.setdefault(used, []).append(value)
        known = all(v in self.weights for v in free)
        if known and isinstance(binding, relax.VarBinding) and name_of(value) not in CALLBACKS:
            self.weights.add(var)

    def on_weights(self, expr: Any) -> bool:
        """Whether an expression is a constant, or one variable that depends on weights alone."""
        if isinstance(expr, tvm.ir.GenericConst):
            return True
        return isinstance(expr, relax.Var) and expr in self.weights

    def only_reader(self, var: Any) -> Any:
        """The one expression that reads a variable, once; None if there are more or fewer."""
        readers = self.readers.get(var, [])
        if len(readers) != 1 or readers[0] is None:
            return None
        value = readers[0]
        operands = [value.tuple_value] if isinstance(value, relax.TupleGetItem) else None
        if operands is None:
            operands = list(value.args) if isinstance(value, tvm.ir.Call) else []
        return value if sum(_same(a, var) for a in operands) == 1 else None


def _same(a: Any, b: Any) -> bool:
    return isinstance(a, relax.Var) and bool(a.same_as(b))


def bindings(func: Any) -> Iterator[Any]:
    """The bindings of a function's body, in order."""
    if isinstance(func.body, relax.SeqExpr):
        for block in func.body.blocks:
            yield from block.bindings


def expressions(mod: Any) -> Iterator[Any]:
    """Every expression in the Relax functions of a module, those inside others as well.

    `relax.analysis.post_order_visit` visits the types too: a tuple of n weights costs it n times n
    sizes.
    """
    ahead = [func for _, func in mod.functions_items() if isinstance(func, relax.Function)]
    while ahead:
        expr = ahead.pop()
        yield expr
        if isinstance(expr, tvm.ir.Call):
            ahead.extend((expr.op, *expr.args))
        elif isinstance(expr, relax.Tuple):
            ahead.extend(expr.fields)
        elif isinstance(expr, relax.TupleGetItem):
            ahead.append(expr.tuple_value)
        elif isinstance(expr, relax.SeqExpr):
            for block in expr.blocks:
                for binding in block.bindings:
                    ahead.extend((binding.var, binding.value))
            ahead.append(expr.body)
        elif isinstance(expr, relax.If):
            ahead.extend((expr.cond, expr.true_branch, expr.false_branch))
        elif isinstance(expr, relax.Function):
            ahead.extend((*expr.params, expr.body))


def result_of(func: Any) -> Any:
    """What a function returns."""
    return func.body.body if isinstance(func.body, relax.SeqExpr) else func.body


def name_of(value: Any) -> str:
    """The operator that an expression calls; empty for all else."""
    return str(getattr(value.op, "name", "")) if isinstance(value, tvm.ir.Call) else ""


def sizes_of(x: Any) -> list[Any] | None:
    """The sizes of a tensor, ints where they are known; None where it has none or is no tensor."""
    shape = getattr(getattr(x, "ty", None), "shape", None)
    if not isinstance(shape, relax.ShapeExpr):
        return None
    return [int(s.value) if isinstance(s, tvm.tirx.IntImm) else s for s in shape.values]


def known(sizes: Sequence[Any]) -> bool:
    """Whether all sizes are numbers."""
    return all(isinstance(size, int) for size in sizes)


def dtype_of(x: Any) -> str:
    """The dtype of a tensor; empty for all else."""
    return str(x.ty.dtype) if isinstance(getattr(x, "ty", None), relax.TensorType) else ""
