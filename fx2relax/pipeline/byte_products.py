"""What the passes on products of bytes share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import relax, tirx
from tvm.relax.expr_functor import PyExprMutator

from .flow import Flow, known, name_of, sizes_of
from .layout import permutation

_op = relax.op
#: Of kernels that are scheduled as they are written, and fused with nothing.
OPAQUE = {"tirx.is_scheduled": True, "op_pattern": 8}


class ByteRewriter(PyExprMutator):  # type: ignore[misc]
    """Rewrites the products of a module's functions.

    Attributes:
        roots: the operators of products; a function without one stays as it is.
        flow: of the function that is being rewritten.
        found: whether any product was replaced.
    """

    roots: tuple[str, ...] = ("relax.matmul",)

    def __init__(self, mod: Any) -> None:
        super().__init__(mod)
        self.mod, self.found = mod, False

    def rewritten(self) -> Any:
        """The module; the same one where nothing was found."""
        for name, func in list(self.mod.functions_items()):
            if isinstance(func, relax.Function):
                self.flow = Flow(func)
                if any(name_of(v) in self.roots for v in self.flow.values.values()):
                    self.builder_.update_func(name, self.visit_expr(func))
        if not self.found:
            return self.mod
        return relax.transform.DeadCodeElimination()(self.builder_.get())

    def made(self, call: Any) -> Any:
        """What stands in the place of a call; None where it stays, as all do here."""
        return None

    def visit_call_(self, call: Any) -> Any:
        """A product of bytes in the place of one of floats."""
        made = self.made(call)
        if made is None:
            return self.visit_expr_post_order(call)
        self.found = True
        return made

    def value(self, x: Any) -> Any:
        """What a variable was bound to; anything else as it is."""
        return self.flow.values.get(x) if isinstance(x, relax.Var) else x

    def flat(self, x: Any) -> Any:
        """A tensor with one axis."""
        return self.builder_.emit(_op.reshape(x, [count_of(sizes_of(x) or [])]))


def count_of(sizes: Sequence[Any]) -> Any:
    """How many elements there are: a number where all sizes are."""
    if known(sizes):
        return math.prod(sizes)
    result: Any = tirx.const(1, "int64")
    for size in sizes:
        result = result * size
    return result


def turns(value: Any) -> bool:
    """Whether an expression is the transpose of a matrix."""
    return name_of(value) == "relax.permute_dims" and permutation(value) == (1, 0)


def by_rows(value: Any) -> bool:
    """Whether a `dequantize` has a scale and a point for each row, or one for all."""
    x, *each = value.args
    rows = (sizes_of(x) or [0])[0]
    if any(sizes_of(numbers) not in ([], [rows]) for numbers in each):
        return False
    return all(sizes_of(numbers) == [] for numbers in each) or int(value.attrs.axis) == 0
