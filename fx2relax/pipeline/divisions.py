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


class Divisions(Rewriter):
    """Truncated division in place of rounded division, which it is where nothing is negative.

    Args:
        sizes: the least that variables are, see `sizes_of`.
    """

    def __init__(self, sizes: dict[Any, int]) -> None:
        self.leasts = dict(sizes)

    def visit_For(self, node: Any) -> Any:
        """A loop, which counts from its first number upwards."""
        self._know(node.loop_var, node.min)
        return self.default(node)

    def bind(self, node: Any) -> Any:
        """A bound variable is what its value is."""
        self._know(node.var, node.value)
        return super().bind(node)

    def _know(self, var: Any, value: Any) -> None:
        least = self.least(value)
        if least is not None:
            self.leasts[var] = least

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
        least = self.least(expr)
        return least is not None and least >= 0

    def least(self, expr: Any) -> int | None:
        """What an integer is never less than; None where that is not known."""
        if isinstance(expr, tirx.IntImm):
            # Times such a number as a size never is, an index starts over below zero.
            return int(expr.value) if abs(int(expr.value)) < 1 << 31 else None
        if isinstance(expr, Var):
            return self.leasts.get(expr)
        kind = type(expr)
        if kind in _BINARY:
            return self._least_of_two(kind, self.least(expr.a), expr.b)
        if kind is tirx.Broadcast or (
            kind is tirx.Cast and _is_index(expr) and _is_index(expr.value)
        ):
            return self.least(expr.value)
        if kind is tirx.Ramp and self.is_natural(expr.stride):
            return self.least(expr.base)
        return None

    def _least_of_two(self, kind: Any, a: int | None, second: Any) -> int | None:
        if kind is tirx.Sub:
            return a - int(second.value) if a is not None and _is_number(second) else None
        b = self.least(second)
        # Elements have none, however they are clamped: a sum of them starts over at its limits.
        if a is None or b is None:
            return None
        if kind in (tirx.Min, tirx.Max):
            return min(a, b) if kind is tirx.Min else max(a, b)
        if kind is tirx.Add:
            return a + b
        if kind is tirx.FloorDiv and _is_number(second) and b > 0:
            return a // b
        if a < 0 or b < 0:
            return None
        return a * b if kind is tirx.Mul else 0


_BINARY = (
    *(tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Mod),
    *(tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max),
)


def _is_index(expr: Any) -> bool:
    return str(expr.ty.dtype).split("x")[0] in ("int32", "int64")


def _is_number(expr: Any) -> bool:
    return isinstance(expr, tirx.IntImm)


def sizes_of(func: Any) -> dict[Any, int]:
    """The least that variables are, of which an axis of one of a kernel's buffers is as long.

    No axis is shorter than 0. One of ``n - 3`` has a window of four in it: `n` is 3 at least.
    """
    found: dict[Any, int] = {}

    def collect(size: Any, least: int) -> None:
        if isinstance(size, Var):
            found[size] = max(found.get(size, 0), least)
        elif isinstance(size, tirx.Mul):
            if _is_number(size.b) and int(size.b.value) > 0:
                collect(size.a, -(-least // int(size.b.value)))
            elif least <= 0:  # both factors are sizes
                collect(size.a, 0)
                collect(size.b, 0)
        elif isinstance(size, (tirx.Add, tirx.Sub)) and _is_number(size.b):
            number = int(size.b.value)
            collect(size.a, least - number if isinstance(size, tirx.Add) else least + number)
        elif isinstance(size, tirx.FloorDiv) and _is_number(size.b) and int(size.b.value) > 0:
            collect(size.a, least * int(size.b.value))

    for param in func.params:
        for size in getattr(param.ty, "shape", ()):
            collect(size, 0)
    return found
