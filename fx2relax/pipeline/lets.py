"""Bound values of an expression, put into local memory, of which LLVM makes registers again.

TVM's code generator simplifies each bound value with the values of the variables in it written
out in full: the length doubles with every binding, and three functions that bind values, one of
another, take minutes. What is read from memory is not written out.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx

from .tir import Call, Rewriter, TensorLoad


class FreeConditions(Rewriter):
    """Moves what the condition of a Select binds to the outside of the Select.

    TVM's simplifier takes a condition for granted while it looks at the branches, and refuses to
    bind a variable of it a second time.
    """

    def expr(self, node: Any) -> Any:
        """The expression with conditions that bind nothing."""
        new = super().expr(node)
        if not isinstance(new, tirx.Select):
            return new
        bound = _Bound()
        condition = bound.expr(new.condition)
        if not bound.found:
            return new
        new = tirx.Select(condition, new.true_value, new.false_value)
        for var, value in reversed(bound.found):
            new = tirx.Let(var, value, new)
        return new


class _Bound(Rewriter):
    """Takes the variables that an expression binds out of it, in the order of their values."""

    def __init__(self) -> None:
        self.found: list[tuple[Any, Any]] = []
        self.guarded = False

    def expr(self, node: Any) -> Any:
        if isinstance(node, tirx.Let) and not (self.guarded and reads(node.value)):
            value = self.expr(node.value)
            self.found.append((node.var, value))
            return self.expr(node.body)
        if isinstance(node, tirx.Select):
            condition = self.expr(node.condition)
            # A branch may read what only its condition makes safe to read.
            outer, self.guarded = self.guarded, True
            branches = [self.expr(b) for b in (node.true_value, node.false_value)]
            self.guarded = outer
            return tirx.Select(condition, *branches)
        if type(node) is Call and getattr(node.op, "name", "") == "tirx.if_then_else":
            return node
        return super().expr(node)


class _Reads(Rewriter):
    def __init__(self) -> None:
        self.found = False

    def leave(self, node: Any) -> Any:
        self.found = self.found or isinstance(node, TensorLoad)
        return node


def reads(node: Any) -> bool:
    """Whether an expression reads memory."""
    search = _Reads()
    search.expr(node)
    return search.found


class StoreLets(Rewriter):
    """Puts what a store's value binds in front of the store, but not out of a condition's branch.

    For lowered kernels, where both branches of a Select are computed in any case.
    """

    def __init__(self) -> None:
        self.stores: list[Any] = []
        self.loads: dict[Any, Any] = {}
        self.movable = False

    def visit_BufferStore(self, node: Any) -> Any:
        """A store after the stores of what its value binds."""
        self.stores, self.loads, self.movable = [], {}, True
        new = Rewriter.store(self, node)
        self.movable = False
        return tirx.SeqStmt([*self.stores, new]) if self.stores else new

    def expr(self, node: Any) -> Any:
        """The expression with memory in place of the variables that it binds."""
        if self.loads and isinstance(node, tvm.ir.Var):
            return self.loads.get(node, node)
        if type(node) is Call and getattr(node.op, "name", "") == "tirx.if_then_else":
            return self.conditional(node)
        while type(node) is tirx.Let and self.movable and "bool" not in str(node.var.ty.dtype):
            self.loads[node.var] = self.stored(node.var, self.expr(node.value))
            node = node.body
        return super().expr(node)

    def conditional(self, node: Any) -> Any:
        """Only one branch is computed, so that nothing is moved out of either."""
        condition = self.expr(node.args[0])
        outer, self.movable = self.movable, False
        branches = [self.expr(branch) for branch in node.args[1:]]
        self.movable = outer
        return self.call(node, [condition, *branches])

    def stored(self, var: Any, value: Any) -> Any:
        """Store a value; the expression that reads it back."""
        dtype = tvm.runtime.DataType(str(value.ty.dtype))
        lanes = int(dtype.lanes)
        scalar = str(value.ty.dtype).split("x")[0]
        # TVM puts small memory of this scope on the stack, and "local" on the heap.
        buffer = tirx.decl_buffer((lanes,), scalar, var.name, scope="global")
        zero = tirx.const(0, "int32")
        at = zero if lanes == 1 else tirx.Ramp(zero, tirx.const(1, "int32"), lanes)
        self.stores += [tirx.AllocBuffer(buffer), tirx.BufferStore(buffer, value, [at])]
        return tirx.BufferLoad(buffer, [at])
