"""Kernels that write into the memory of what they change.

Where a result is what an input is to hold from then on, as a cache of keys or a weight that an
optimizer changes, and nobody reads the input after that, it may be written to at once. A kernel
that replaces elements of a tensor then does without the copy that it makes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, s_tir, tirx

from ..compat import Var, tvm_ffi
from ..marks import CHANGES, COPIES
from .blocks import SPATIAL, Block
from .flow import name_of
from .library import PREFIX
from .tir import Rewriter, with_body


@dataclass
class Link:
    """A kernel on the way from a parameter to a result.

    Attributes:
        memory: what it writes to.
        kernel: its variable.
        copies: whether it copies its first argument, and then changes the copy.
    """

    memory: Any
    kernel: Any
    copies: bool


class Places:
    """Who reads which memory of a function, and when.

    Args:
        mod: kernels are called with the memory that they write to.
        function: one straight line.

    Attributes:
        calls: the expressions that are no views, in their order.
        uses: by what `root` gives for a variable, the calls that read or write it, by their place.
    """

    def __init__(self, mod: Any, function: Any) -> None:
        self._mod = mod
        self._roots: dict[Any, Any] = {}
        self.calls: list[Any] = []
        self.uses: dict[Any, list[int]] = {}
        for binding in (b for block in function.body.blocks for b in block.bindings):
            value = binding.value
            if isinstance(value, Var):
                self._roots[binding.var] = self.root(value)
            elif name_of(value) == "relax.reshape" and isinstance(value.args[0], Var):
                self._roots[binding.var] = self.root(value.args[0])
            else:
                self._use(value)

    def _use(self, value: Any) -> None:
        for var in relax.analysis.free_vars(value):
            self.uses.setdefault(self.root(var), []).append(len(self.calls))
        self.calls.append(value)

    def root(self, var: Any) -> Any:
        """The variable that a variable is, or is a view of."""
        return self._roots.get(var, var)

    def changed(
        self, wanted: Mapping[int, tuple[Any, Any]], origins: Sequence[Any]
    ) -> dict[int, list[Link]]:
        """The results that may lie in the memory of a parameter.

        Args:
            wanted: by a result's place, its memory, as `alloc_tensor` was bound to a variable, and
                the parameter.
            origins: the memory of all results.

        Returns:
            by place, the kernels by which the parameter becomes the result, the last one first.
        """
        found = {}
        for index, (memory, param) in wanted.items():
            chain = self._chain(memory, param)
            if chain is not None and all(
                sum(o.same_as(link.memory) for o in origins) == link.memory.same_as(memory)
                for link in chain
            ):
                found[index] = chain
        # A kernel keeps its name, by which profilers know it: all calls of it are alike.
        while True:
            links = [link for chain in found.values() for link in chain if link.copies]
            used = Counter(link.kernel for link in links)
            mixed = {kernel for kernel in used if used[kernel] != self._calls_of(kernel)}
            if not mixed:
                return found
            found = {
                index: chain
                for index, chain in found.items()
                if mixed.isdisjoint(link.kernel for link in chain if link.copies)
            }

    def _chain(self, memory: Any, param: Any) -> list[Link] | None:
        """The kernels by which a parameter becomes what is in a memory, the last one first.

        None where there is another way, or a value on the way is read after it was replaced.
        """
        if not all(self.only_uses(self.calls[use]) for use in self.uses.get(param, [])):
            return None
        found: list[Link] = []
        while True:
            uses = self.uses.get(memory, [])
            call = self.calls[uses[0]] if uses else None
            if call is None or not self.is_kernel(call):
                return None
            operands = [self.root(a) if isinstance(a, Var) else a for a in call.args]
            places = [n for n, operand in enumerate(operands) if operand.same_as(memory)]
            if len(places) != 1:
                return None
            copies = CHANGES in (self._mod[call.op].attrs or {}) and isinstance(call.args[0], Var)
            before = operands[0] if copies else param
            if any(use > uses[0] for use in self.uses.get(before, [])):
                return None
            read = [n for n, operand in enumerate(operands) if operand.same_as(before)]
            if copies:
                safe = read == [0]
            else:
                safe = not read or _by_element(self._mod[call.op], read, places[0])
            if not safe:
                return None
            found.append(Link(memory, call.op, copies))
            if before.same_as(param):
                return found
            memory = before

    def only_uses(self, value: Any) -> bool:
        """Whether an expression only reads and writes its operands, and keeps or views none."""
        callee = getattr(value, "op", None)
        if isinstance(callee, relax.ExternFunc):
            return str(callee.global_symbol).startswith(PREFIX)
        return self.is_kernel(value)

    def is_kernel(self, value: Any) -> bool:
        """Whether an expression calls a generated kernel."""
        callee = getattr(value, "op", None)
        return isinstance(callee, relax.GlobalVar) and isinstance(self._mod[callee], tirx.PrimFunc)

    def _calls_of(self, kernel: Any) -> int:
        return sum(self.is_kernel(c) and c.op.same_as(kernel) for c in self.calls)


def _by_element(kernel: Any, read: Sequence[int], written: int) -> bool:
    """Whether a kernel reads of some arguments only the element that it is about to replace."""
    sch = s_tir.Schedule(tvm.IRModule({"main": kernel}), error_render_level="none")
    try:
        blocks = [Block(sch, rv) for rv in sch.get_child_blocks(sch.get_sblock("root"))]
    except Exception:  # one of statements that are no blocks
        return False
    out = kernel.params[written]
    last = [b for b in blocks if _among(out, b.writes)]
    if len(last) != 1:
        return False
    (block,) = last
    if any(axis.kind != SPATIAL for axis in block.axes):
        return False
    for place in read:
        buffer = kernel.params[place]
        if any(_among(buffer, b.reads) for b in blocks if b is not block):
            return False
        if not replaces(block, buffer):
            return False
    return True


def replaces(block: Block, buffer: Any) -> bool:
    """Whether a step reads of a buffer only the element that it makes another of."""
    store = block.store
    if store is None or not _alike(buffer, store.buffer):
        return False
    return all(_equal(load.indices, store.indices) for load in block.loads_of(buffer))


def _among(buffer: Any, buffers: Sequence[Any]) -> bool:
    return any(buffer.same_as(other) for other in buffers)


def _alike(one: Any, other: Any) -> bool:
    """Whether two buffers have one dtype and the same sizes."""
    return str(one.dtype) == str(other.dtype) and _equal(one.ty.shape, other.ty.shape)


def _equal(some: Any, others: Any) -> bool:
    """Whether two lists of expressions are the same."""
    pairs = zip(some, others, strict=False)
    return len(some) == len(others) and all(tvm_ffi.structural_equal(*pair) for pair in pairs)


def in_its_place(kernel: Any, copies: bool) -> Any:
    """A kernel for calls in which its result lies in the memory of an argument.

    Args:
        kernel: any.
        copies: whether it copies its first argument, which is now there already.

    Raises:
        NotHandled: it holds a statement that is not known.
    """
    # An element that is read for the one in its place is read first, whatever LLVM may move by the
    # promise that no two arguments share memory.
    return kernel.with_body(_Left().stmt(kernel.body)) if copies else kernel


class _Left(Rewriter):
    """What is left of statements without the loop that copies."""

    def visit_SBlockRealize(self, node: Any) -> Any:
        return with_body(node, self.stmt(node.block.body), node.block.init)

    def visit_For(self, node: Any) -> Any:
        return tirx.Evaluate(0) if COPIES in node.annotations else node
