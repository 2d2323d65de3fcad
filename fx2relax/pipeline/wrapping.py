"""Integer arithmetic that wraps around, as PyTorch's does.

TVM tells LLVM that signed integers of 32 bits and more never overflow, and LLVM then takes
``x + 1 > x`` for true. In twice as many bits they do not, and LLVM itself narrows what is cut off
again to plain instructions that wrap.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from .tir import Call, Rewriter, TensorLoad, holds

_OVERFLOWING = (tirx.Add, tirx.Sub, tirx.Mul)
_WIDER = {"int32": "int64", "int64": "int128"}


def reads_data(node: Any, bound: set[Any]) -> bool:
    """Whether an expression depends on what a kernel reads, and not on loops and sizes alone.

    Args:
        node: an expression.
        bound: the variables that the kernel binds to values.
    """
    return holds(node, lambda part: isinstance(part, (TensorLoad, Call)) or part in bound)


class Bound(Rewriter):
    """A rewriter that knows, wherever it is, which variables are bound to values."""

    def __init__(self) -> None:
        self.bound: set[Any] = set()

    def expr(self, node: Any) -> Any:
        """Rewrite an expression."""
        if isinstance(node, tirx.Let):
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
        return node if isinstance(node, TensorLoad) else super().expr(node)

    def visit_BufferStore(self, node: Any) -> Any:
        """Rewrite what is stored, and not where."""
        value = self.expr(node.value)
        if value is node.value:
            return node
        return tirx.BufferStore(node.buffer, value, list(node.indices))

    def leave(self, node: Any) -> Any:
        """One operation, cut off to its own width; a division of what may have wrapped around."""
        if isinstance(node, (tirx.FloorDiv, tirx.FloorMod)) and self._may_wrap(node.a):
            # TVM takes a sum of numbers that are not negative for one that is not. LLVM, not TVM,
            # knows that no number is less than the least one.
            kind = str(node.ty.dtype)
            least = tirx.min_value(kind.partition("x")[0])
            known = tirx.call_llvm_pure_intrin(kind, "llvm.smax", node.a, _spread(least, kind))
            return type(node)(known, node.b)
        if not isinstance(node, _OVERFLOWING):
            return node
        kind, _, lanes = str(node.ty.dtype).partition("x")
        if kind not in _WIDER or not reads_data(node, self.bound):
            return node
        wide = _WIDER[kind] + (f"x{lanes}" if lanes else "")
        result = type(node)(tirx.Cast(wide, node.a), tirx.Cast(wide, node.b))
        return tirx.Cast(node.ty.dtype, result)

    def _may_wrap(self, node: Any) -> bool:
        if not str(node.ty.dtype).startswith("int") or isinstance(node, (TensorLoad, Call)):
            return False
        return reads_data(node, self.bound)


def _spread(number: Any, kind: str) -> Any:
    """A number in every lane of a type."""
    lanes = kind.partition("x")[2]
    return tirx.Broadcast(number, int(lanes)) if lanes else number
