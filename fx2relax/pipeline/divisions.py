"""Rounded division without bound variables.

Where TVM does not know the divisor's sign, it binds the remainder to a variable, twice the same
one where an index is used twice, and then refuses the kernel; nested ones double its length. It
does not know that sizes are not negative either.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.ir import Var

from .tir import Rewriter

_NEVER_LESS = {
    cls.__name__
    for cls in (
        tirx.Add,
        tirx.Mul,
        tirx.Div,
        tirx.Mod,
        tirx.FloorDiv,
        tirx.FloorMod,
        tirx.Min,
        tirx.Max,
    )
}


class Divisions(Rewriter):
    """Truncated division in place of rounded division, which it is where nothing is negative.

    Args:
        sizes: variables that are never negative.
    """

    def __init__(self, sizes: set[Any]) -> None:
        self.natural = set(sizes)

    def visit_For(self, node: Any) -> Any:
        """A loop, which counts from its first number upwards."""
        if self.is_natural(node.min):
            self.natural.add(node.loop_var)
        return self.default(node)

    def bind(self, node: Any) -> Any:
        """A bound variable is what its value is."""
        if self.is_natural(node.value):
            self.natural.add(node.var)
        return super().bind(node)

    def leave(self, node: Any) -> Any:
        """Replace a division by anything but a number."""
        kind = type(node)
        if kind not in (tirx.FloorDiv, tirx.FloorMod) or isinstance(node.b, tirx.IntImm):
            return node
        if "int" not in str(node.ty.dtype):
            return node
        a, b = node.a, node.b
        quotient, rest = tirx.Div(a, b), tirx.Mod(a, b)
        if self.is_natural(a) and self.is_natural(b):
            return quotient if kind is tirx.FloorDiv else rest
        zero = tirx.const(0, str(node.ty.dtype))
        down = tirx.LT(tirx.BitwiseXor(rest, b), zero)
        if kind is tirx.FloorDiv:
            one = tirx.const(1, str(node.ty.dtype))
            lower = tirx.Select(down, tirx.Sub(quotient, one), quotient)
            return tirx.Select(tirx.NE(rest, zero), lower, quotient)
        raised = tirx.Select(down, tirx.Add(rest, b), rest)
        return tirx.Select(tirx.NE(rest, zero), raised, rest)

    def is_natural(self, expr: Any) -> bool:
        """Whether an integer is certainly not negative."""
        if isinstance(expr, tirx.IntImm):
            return int(expr.value) >= 0
        if isinstance(expr, Var):
            return expr in self.natural
        name = type(expr).__name__
        if name in _NEVER_LESS:
            return self.is_natural(expr.a) and self.is_natural(expr.b)
        if name in ("Cast", "Broadcast"):
            return "int" in str(expr.value.ty.dtype) and self.is_natural(expr.value)
        if name == "Ramp":
            return self.is_natural(expr.base) and self.is_natural(expr.stride)
        return False


def sizes_of(func: Any) -> set[Any]:
    """The variables that are, or are a factor of, an axis of one of a kernel's buffers."""
    found: set[Any] = set()

    def collect(size: Any) -> None:
        if isinstance(size, Var):
            found.add(size)
        elif isinstance(size, tirx.Mul):
            collect(size.a)
            collect(size.b)
        elif isinstance(size, tirx.FloorDiv) and isinstance(size.b, tirx.IntImm):
            collect(size.a)  # what a number divides into a size is not negative

    for param in func.params:
        for size in getattr(param.ty, "shape", ()):
            collect(size)
    return found
