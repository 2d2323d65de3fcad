"""Kernels that write into the memory of what they change, and do not copy it first.

A kernel that replaces elements of a tensor copies the tensor, then writes to the copy. Where the
result is what an input is to hold from then on, as a cache of keys does, and nobody reads the input
after that, it may be written to at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm import relax, s_tir, tirx

from ..compat import Var
from .tir import Rewriter

_SBlock = s_tir.stmt.SBlock

#: A kernel's attribute: it copies its first argument to its one result, then writes to that.
CHANGES = "fx2relax.changes"
#: The annotation of the loop that copies.
COPIES = "fx2relax.copies"

#: The memory that each kernel writes to, and the kernel; the last one first.
Chain = list[tuple[Any, Any]]


class Places:
    """Who reads which memory of a function, and when.

    Args:
        mod: kernels are called with the memory that they write to.
        function: one straight line.
    """

    def __init__(self, mod: Any, function: Any) -> None:
        self._mod = mod
        self._roots: dict[Any, Any] = {}
        self._calls: list[Any] = []
        self._uses: dict[Any, list[int]] = {}
        for binding in (b for block in function.body.blocks for b in block.bindings):
            value = binding.value
            if isinstance(value, Var):
                self._roots[binding.var] = self.root(value)
            elif _name_of(value) == "relax.reshape" and isinstance(value.args[0], Var):
                self._roots[binding.var] = self.root(value.args[0])
            else:
                self._use(value)

    def _use(self, value: Any) -> None:
        for var in relax.analysis.free_vars(value):
            self._uses.setdefault(self.root(var), []).append(len(self._calls))
        self._calls.append(value)

    def root(self, var: Any) -> Any:
        """The variable that a variable is, or is a view of."""
        return self._roots.get(var, var)

    def changed(
        self, wanted: Mapping[int, tuple[Any, Any]], origins: Sequence[Any]
    ) -> dict[int, Chain]:
        """The results that may lie in the memory of a parameter.

        Args:
            wanted: by a result's place, its memory, as `alloc_tensor` was bound to a variable, and
                the parameter.
            origins: the memory of all results.

        Returns:
            by place, the kernels by which the parameter becomes the result.
        """
        found = {}
        for index, (memory, param) in wanted.items():
            chain = self._chain(memory, param)
            if chain is not None and all(
                sum(origin.same_as(target) for origin in origins) == target.same_as(memory)
                for target, _ in chain
            ):
                found[index] = chain
        # A kernel keeps its name, by which profilers know it: all calls of it are alike.
        while True:
            used = Counter(kernel for chain in found.values() for _, kernel in chain)
            mixed = {kernel for kernel in used if used[kernel] != self._calls_of(kernel)}
            if not mixed:
                return found
            found = {i: c for i, c in found.items() if mixed.isdisjoint(k for _, k in c)}

    def _chain(self, memory: Any, param: Any) -> Chain | None:
        """The kernels by which a parameter becomes what is in a memory, the last one first.

        None where there is another way, or a value on the way is read after it was replaced.
        """
        found = []
        while not memory.same_as(param):
            uses = self._uses.get(memory, [])
            call = self._calls[uses[0]] if uses else None
            if call is None or not self._changes(call, memory):
                return None
            before = self.root(call.args[0])
            if any(use > uses[0] for use in self._uses.get(before, [])):
                return None
            if before.same_as(param) and not self._known(param):
                return None
            found.append((memory, call.op))
            memory = before
        return found

    def _changes(self, call: Any, memory: Any) -> bool:
        """Whether a call is of a kernel that writes to this memory what its first argument was."""
        if not self._is_kernel(call) or CHANGES not in (self._mod[call.op].attrs or {}):
            return False
        operands = [self.root(a) if isinstance(a, Var) else a for a in call.args]
        return sum(a.same_as(memory) for a in operands) == 1 and isinstance(call.args[0], Var)

    def _known(self, param: Any) -> bool:
        """Whether only kernels read a parameter: all else may keep it, or make views of it."""
        return all(self._is_kernel(self._calls[use]) for use in self._uses.get(param, []))

    def _is_kernel(self, value: Any) -> bool:
        callee = getattr(value, "op", None)
        return isinstance(callee, relax.GlobalVar) and isinstance(self._mod[callee], tirx.PrimFunc)

    def _calls_of(self, kernel: Any) -> int:
        return sum(_is_same(getattr(call, "op", None), kernel) for call in self._calls)


def without_copy(kernel: Any) -> Any:
    """A kernel that changes its first argument, for one that is in the result's memory already.

    Raises:
        NotHandled: it holds a statement that is not known.
    """
    return kernel.with_body(_Left().stmt(kernel.body))


class _Left(Rewriter):
    """What is left of statements without the loop that copies."""

    def visit_SBlockRealize(self, node: Any) -> Any:
        block = node.block
        left = _SBlock(
            block.iter_vars,
            block.reads,
            block.writes,
            block.name_hint,
            self.stmt(block.body),
            block.init,
            block.alloc_buffers,
            block.match_buffers,
            block.annotations,
        )
        return s_tir.SBlockRealize(node.iter_values, node.predicate, left)

    def visit_For(self, node: Any) -> Any:
        return tirx.Evaluate(0) if COPIES in node.annotations else node


def _name_of(value: Any) -> str:
    return str(getattr(getattr(value, "op", None), "name", ""))


def _is_same(one: Any, other: Any) -> bool:
    return isinstance(one, tvm.ir.GlobalVar) and bool(one.same_as(other))
