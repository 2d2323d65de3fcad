"""Bound values of an expression, put into local memory, of which LLVM makes registers again.

TVM's code generator simplifies each bound value with the values of the variables in it written
out in full: the length doubles with every binding, and three functions that bind values, one of
another, take minutes. What is read from memory is not written out.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx

from .present import always
from .tir import Call, Rewriter, TensorLoad, holds, is_guard

#: What there is in a kernel that binds values inside of an expression.
LETS = {tirx.Let: always}


class ChainLets(Rewriter):
    """Binds what a store's value binds one after another, outside of all arithmetic.

    TVM's simplifier looks at some operands twice, and at a condition once more in each branch; it
    refuses to bind a variable a second time.
    """

    def visit_BufferStore(self, node: Any) -> Any:
        """A store of a chain."""
        value = node.value
        if str(node.buffer.dtype) == "bfloat16" and isinstance(value, Call):
            # TVM's storage pass knows a bfloat16 by the call that makes one of bits.
            value = self.call(value, [_chain(arg) for arg in value.args])
        else:
            value = _chain(value)
        return tirx.BufferStore(node.buffer, value, list(node.indices))

    def visit_Bind(self, node: Any) -> Any:
        """A variable of the statements that follow."""
        return tirx.Bind(node.var, _chain(node.value))


def _chain(node: Any) -> Any:
    bound = _Bound()
    body = bound.expr(node)
    for var, value in reversed(bound.found.items()):
        body = tirx.Let(var, value, body)
    return body


class _Bound(Rewriter):
    """Takes the variables that an expression binds out of it, in the order of their values."""

    def __init__(self) -> None:
        self.found: dict[Any, Any] = {}
        self.guarded = False

    def expr(self, node: Any) -> Any:
        if type(node) is tirx.Let:
            if self.guarded and _reads_anywhere(node.value):
                return node
            if node.var not in self.found:
                value = self.expr(node.value)
                self.found[node.var] = value
            return self.expr(node.body)
        if type(node) is tirx.Select:
            condition = self.expr(node.condition)
            # Only its condition may make an index safe that was read from memory.
            outer, self.guarded = self.guarded, True
            branches = [self.expr(b) for b in (node.true_value, node.false_value)]
            self.guarded = outer
            return tirx.Select(condition, *branches)
        if is_guard(node):
            condition = self.expr(node.args[0])
            return self.call(node, [condition, *(_chain(branch) for branch in node.args[1:])])
        return super().expr(node)


def _reads(node: Any) -> bool:
    """Whether an expression reads memory."""
    return holds(node, lambda part: type(part) is TensorLoad)


def _reads_anywhere(node: Any) -> bool:
    """Whether an expression reads memory at a place that it read from memory."""
    return holds(node, lambda part: type(part) is TensorLoad and any(map(_reads, part.indices)))


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
        if self.loads and type(node) is tvm.ir.Var:
            return self.loads.get(node, node)
        if is_guard(node):
            return self.conditional(node)
        while type(node) is tirx.Let and self.movable and "bool" not in str(node.var.ty.dtype):
            self.loads[node.var] = self.stored(node.var, self.expr(node.value))
            node = node.body
        return super().expr(node)

    def conditional(self, node: Any) -> Any:
        """Only one branch is computed: what one binds is stored in a branch of its own."""
        condition = self.expr(node.args[0])
        binds = any(holds(branch, _is_let) for branch in node.args[1:])
        if self.movable and binds and _lanes(condition) == 1:
            return self.branched(condition, node)
        outer, self.movable = self.movable, False
        branches = [self.expr(branch) for branch in node.args[1:]]
        self.movable = outer
        return self.call(node, [condition, *branches])

    def branched(self, condition: Any, node: Any) -> Any:
        """Store what a conditional gives, by a statement; the expression that reads it back."""
        buffer, at = _local("chosen", node)
        outer, arms = self.stores, []
        for branch in node.args[1:]:
            self.stores = []
            value = self.expr(branch)
            last = tirx.BufferStore(buffer, value, [at])
            arms.append(tirx.SeqStmt([*self.stores, last]) if self.stores else last)
        self.stores = [*outer, tirx.AllocBuffer(buffer), tirx.IfThenElse(condition, *arms)]
        return tirx.BufferLoad(buffer, [at])

    def stored(self, var: Any, value: Any) -> Any:
        """Store a value; the expression that reads it back."""
        buffer, at = _local(var.name, value)
        self.stores += [tirx.AllocBuffer(buffer), tirx.BufferStore(buffer, value, [at])]
        return tirx.BufferLoad(buffer, [at])


def _is_let(node: Any) -> bool:
    return type(node) is tirx.Let


def _lanes(value: Any) -> int:
    return int(tvm.runtime.DataType(str(value.ty.dtype)).lanes)


def _local(name: str, value: Any) -> tuple[Any, Any]:
    """Memory for a value, and the index of all of it."""
    lanes = _lanes(value)
    scalar = str(value.ty.dtype).split("x")[0]
    # TVM puts small memory of this scope on the stack, and "local" on the heap.
    buffer = tirx.decl_buffer((lanes,), scalar, name, scope="global")
    zero = tirx.const(0, "int32")
    return buffer, zero if lanes == 1 else tirx.Ramp(zero, tirx.const(1, "int32"), lanes)
