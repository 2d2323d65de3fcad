"""Integer arithmetic that wraps around, as PyTorch's does.

TVM tells LLVM that signed integers of 32 bits and more never overflow, and LLVM then takes
``x + 1 > x`` for true. In twice as many bits they do not, and LLVM itself narrows what is cut off
again to plain instructions that wrap.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from .divisions import ROUNDED
from .present import of_dtype
from .tir import Call, Rewriter, TensorLoad, holds

# Of these no class is derived: the type itself is compared, in a third of the time that
# `isinstance` takes, which is asked for every part of every kernel.
_OVERFLOWING = (tirx.Add, tirx.Sub, tirx.Mul)
_DATA = (TensorLoad, Call)
#: What there is in a kernel that computes with integers that it has read or made of floats.
READ_INTEGERS = of_dtype("int")
_WIDER = {"int32": "int64", "int64": "int128"}


def reads_data(node: Any, bound: set[Any]) -> bool:
    """Whether an expression depends on what a kernel reads, and not on loops and sizes alone.

    Args:
        node: an expression.
        bound: the variables that the kernel binds to values.
    """
    return holds(node, lambda part: type(part) in _DATA or part in bound)


class Bound(Rewriter):
    """A rewriter that knows, wherever it is, which variables are bound to values."""

    def __init__(self) -> None:
        self.bound: set[Any] = set()

    def expr(self, node: Any) -> Any:
        """Rewrite an expression."""
        if type(node) is tirx.Let:
            self.bound.add(node.var)
        return super().expr(node)

    def visit_Bind(self, node: Any) -> Any:
        """A variable of the statements that follow."""
        self.bound.add(node.var)
        return self.bind(node)


class Wrap(Bound):
    """Adds, subtracts and multiplies data in wider integers; indices stay as they are."""

    def expr(self, node: Any) -> Any:
        """Rewrite an expression; where memory is read does not overflow."""
        return node if type(node) is TensorLoad else super().expr(node)

    def visit_BufferStore(self, node: Any) -> Any:
        """Rewrite what is stored, and not where."""
        value = self.expr(node.value)
        if value is node.value:
            return node
        return tirx.BufferStore(node.buffer, value, list(node.indices))

    def leave(self, node: Any) -> Any:
        """One operation, cut off to its own width; a division of what may have wrapped around."""
        if type(node) in ROUNDED and self._may_wrap(node.a):
            # TVM takes a sum of numbers that are not negative for one that is not. LLVM, not TVM,
            # knows that no number is less than the least one.
            kind = str(node.ty.dtype)
            least = tirx.min_value(kind.partition("x")[0])
            known = tirx.call_llvm_pure_intrin(kind, "llvm.smax", node.a, _spread(least, kind))
            return type(node)(known, node.b)
        if type(node) not in _OVERFLOWING:
            return node
        kind, _, lanes = str(node.ty.dtype).partition("x")
        if kind not in _WIDER or not reads_data(node, self.bound):
            return node
        wide = _WIDER[kind] + (f"x{lanes}" if lanes else "")
        result = type(node)(tirx.Cast(wide, node.a), tirx.Cast(wide, node.b))
        return tirx.Cast(node.ty.dtype, result)

    def _may_wrap(self, node: Any) -> bool:
        if type(node) in _DATA or not str(node.ty.dtype).startswith("int"):
            return False
        return reads_data(node, self.bound)


def _spread(number: Any, kind: str) -> Any:
    """A number in every lane of a type."""
    lanes = kind.partition("x")[2]
    return tirx.Broadcast(number, int(lanes)) if lanes else number
