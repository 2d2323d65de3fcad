"""Rounded division without bound variables.

Where TVM does not know the divisor's sign, it binds the remainder to a variable, twice the same
one where an index is used twice, and then refuses the kernel; nested ones double its length. It
does not know that sizes are not negative either.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.ir import Var
from tvm.sym import Analyzer
from tvm_ffi import StructuralKey

from .tir import Rewriter

#: The divisions that round down.
ROUNDED = (tirx.FloorDiv, tirx.FloorMod)


def by_no_number(node: Any) -> bool:
    """Whether a division is one of integers by anything but a number."""
    return type(node.b) is not tirx.IntImm and "int" in str(node.ty.dtype)


class Divisions(Rewriter):
    """Truncated division in place of rounded division, which it is where nothing is negative.

    Args:
        sizes: the least that variables and sums are, see `sizes_of`.
    """

    def __init__(self, sizes: dict[Any, int]) -> None:
        self.leasts = dict(sizes)
        self._knows_sums = any(isinstance(size, StructuralKey) for size in sizes)

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
        if kind not in ROUNDED or not by_no_number(node):
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
            return _small(expr)
        if isinstance(expr, Var):
            return self.leasts.get(expr)
        kind = type(expr)
        if kind is tirx.Max and (number := _clamped_at(expr)) is not None:
            return number
        if kind in _BINARY:
            least = self._least_of_two(kind, self.least(expr.a), expr.b)
            known = self._knows_sums and kind in _SUMS
            other = self.leasts.get(StructuralKey(expr)) if known else None
            return max((each for each in (least, other) if each is not None), default=None)
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
        # Elements have none, clamped on one side: a sum of them starts over at its limits.
        if a is None or b is None:
            return None
        if kind in (tirx.Min, tirx.Max):
            return min(a, b) if kind is tirx.Min else max(a, b)
        if kind is tirx.Add:
            return a + b
        if _is_number(second) and b > 0 and kind in (tirx.FloorDiv, tirx.Mul):
            return a // b if kind is tirx.FloorDiv else a * b
        if a < 0 or b < 0:
            return None
        return a * b if kind is tirx.Mul else 0


_BINARY = (
    *(tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Mod),
    *(tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max),
)
_SUMS = (tirx.Add, tirx.Sub)


def _small(expr: Any) -> int | None:
    """A number. Times such a one as a size never is, an index starts over below zero."""
    if not _is_number(expr) or abs(int(expr.value)) >= 1 << 31:
        return None
    return int(expr.value)


def _clamped_at(maximum: Any) -> int | None:
    """The number that a maximum is no less than, if it is no more than another number."""
    for number, rest in ((maximum.a, maximum.b), (maximum.b, maximum.a)):
        limits = (rest.a, rest.b) if isinstance(rest, tirx.Min) else ()
        if _small(number) is not None and any(_small(each) is not None for each in limits):
            return _small(number)
    return None


def _is_index(expr: Any) -> bool:
    return str(expr.ty.dtype).split("x")[0] in ("int32", "int64")


def _is_number(expr: Any) -> bool:
    return isinstance(expr, tirx.IntImm)


def sizes_of(func: Any) -> dict[Any, int]:
    """The least that variables are, of which an axis of one of a kernel's buffers is as long.

    No axis is shorter than 0. One of ``n - 3`` has a window of four in it: `n` is 3 at least. What
    is known of ``n + m`` is said of neither: the key is their sum, a `StructuralKey`.
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
        elif isinstance(size, _SUMS) and _is_number(size.b):
            number = int(size.b.value)
            collect(size.a, least - number if isinstance(size, tirx.Add) else least + number)
        elif isinstance(size, _SUMS):
            key = StructuralKey(size)
            found[key] = max(found.get(key, least), least)
        elif isinstance(size, tirx.FloorDiv) and _is_number(size.b) and int(size.b.value) > 0:
            collect(size.a, least * int(size.b.value))

    simplify = Analyzer().simplify
    for param in func.params:
        for size in getattr(param.ty, "shape", ()):
            collect(size, 0)
            if not isinstance(size, Var | tirx.IntImm):
                collect(simplify(size), 0)  # as in indices
    return found
