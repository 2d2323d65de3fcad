"""Long sums of floating-point numbers as sums of sums.

A running sum rounds each time to its own size: of a million equal terms, a float32 gets the second
digit wrong. Like PyTorch, a sum here has few terms, each of which is such a sum of what lies side
by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import tirx

from ..compat import const_int
from .tir import Substitute, counted, rebuild_for, uses

CASCADE = "fx2relax.cascade"
TERMS = 32  # of a sum that is left as it is
# Sums whose length is not known have larger blocks and so many levels: more would cost the short.
_LARGER, _LEVELS = 64, 2
_LANES = 16  # of a vector, which are added up one by one in the end

#: The statement that adds something to a place; None stands for the result.
Adding = Callable[[Any], Any]
#: The same for one turn of a loop.
Turn = Callable[[Any, Any], Any]


class Parts:
    """Sums that are terms of others.

    Args:
        make: makes the memory of one.
        clear: the statement by which it is 0.
        flush: the statement that adds one to another place.

    Attributes:
        allocated: statements that come before all others.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        clear: Callable[[Any], Any],
        flush: Callable[[Any, Any], Any],
    ) -> None:
        self._make, self._clear, self._flush = make, clear, flush
        self.allocated: list[Any] = []

    def loop(
        self, name: str, extent: Any, dtype: Any, turn: Turn, terms: int = 1
    ) -> tuple[Adding, int]:
        """A loop over what is added up.

        Args:
            name: of its variable.
            extent: its turns.
            dtype: that of the variable.
            turn: what they do.
            terms: how much one of them adds.

        Returns:
            the loop, and how much it adds.
        """
        length = int(extent.value) if isinstance(extent, tirx.IntImm) else None
        levels = 0
        while levels < _LEVELS if length is None else length * terms > TERMS:
            levels += 1
            size = max((_LARGER if length is None else TERMS) // terms, 1)
            turn, extent = self._blocks(name, extent, dtype, turn, size)
            length = None if length is None else -(-length // size)
            terms = 1

        def whole(place: Any) -> Any:
            return counted(name, dtype, extent, lambda i: turn(i, place))

        return whole, _LARGER if length is None else length * terms

    def _blocks(
        self, name: str, extent: Any, dtype: Any, turn: Turn, size: int
    ) -> tuple[Turn, Any]:
        """So many turns as one, and how many those are."""
        part = self._make()
        self.allocated.append(tirx.AllocBuffer(part))
        width = tirx.const(size, dtype)
        simplify = tvm.sym.Analyzer().simplify

        def block(i: Any, place: Any) -> Any:
            first = i * width
            left = width if size == 1 else tirx.min(width, extent - first)
            inside = counted(name, dtype, left, lambda j: turn(first + j, part))
            return tirx.SeqStmt([self._clear(part), inside, self._flush(part, place)])

        return block, simplify(tirx.floordiv(extent + tirx.const(size - 1, dtype), width))


class _Leaf:
    """What is inside all loops over terms: adds to one place, or to those along a vector.

    Args:
        node: the statement.
        along: the mark of a loop along a vector.
    """

    def __init__(self, node: Any, along: str) -> None:
        self.loop: Any = node if isinstance(node, tirx.For) else None
        body = node if self.loop is None else node.body
        self.guard = None
        if isinstance(body, tirx.IfThenElse) and body.else_case is None:
            self.guard, body = body.condition, body.then_case
        self.store: Any = body
        self.vector = self.loop is not None and along in self.loop.annotations

    @property
    def terms(self) -> int:
        """How many numbers it adds to a place, one after the other."""
        if self.loop is None or self.vector:
            return 1
        length = const_int(self.loop.extent)
        return length if isinstance(length, int) and length < 2 * _LANES else _LANES

    def is_sum(self, varying: list[Any]) -> bool:
        """Whether it is a sum over these variables, and nothing else depends on them."""
        store = self.store
        if not isinstance(store, tirx.BufferStore) or str(store.buffer.dtype) not in (
            "float32",
            "float64",
        ):
            return False
        if self.loop is not None and not self.vector:
            varying = [*varying, self.loop.loop_var]
        fixed = [*store.indices, *([] if self.guard is None else [self.guard])]
        if any(uses(e, v) for e in fixed for v in varying):
            return False
        return not self.vector or isinstance(self.loop.extent, tirx.IntImm)

    def part(self) -> Any:
        """Memory for what it adds to."""
        length = self.loop.extent if self.vector else tirx.const(1, "int32")
        return tirx.decl_buffer((length,), str(self.store.buffer.dtype), "part")

    def clear(self, part: Any) -> Any:
        """The statement by which that is 0."""
        zero = tirx.const(0, str(part.dtype))
        return self._along(lambda: tirx.BufferStore(part, zero, self._at(part)))

    def flush(self, part: Any, place: Any) -> Any:
        """The statement that adds it to another place."""
        value = tirx.BufferLoad(part, self._at(part))
        return self._along(lambda: self._guarded(self._plus(place, value)))

    def adding(self, place: Any) -> Any:
        """What it does, with another place."""
        body = self._guarded(self._plus(place, self.store.value.b))
        return body if self.loop is None else self._with_own_variable(body)

    def _at(self, place: Any) -> list[Any]:
        if place is None:
            return list(self.store.indices)
        return [self.loop.loop_var if self.vector else tirx.const(0, "int32")]

    def _plus(self, place: Any, value: Any) -> Any:
        buffer, at = self.store.buffer if place is None else place, self._at(place)
        return tirx.BufferStore(buffer, tirx.BufferLoad(buffer, at) + value, at)

    def _guarded(self, store: Any) -> Any:
        return store if self.guard is None else tirx.IfThenElse(self.guard, store, None)

    def _along(self, body: Callable[[], Any]) -> Any:
        return self._with_own_variable(body()) if self.vector else body()

    def _with_own_variable(self, body: Any) -> Any:
        old = self.loop
        var = tirx.Var(old.loop_var.name, old.loop_var.ty.dtype)
        body = Substitute({old.loop_var: var}).stmt(body)
        return tirx.For(var, old.min, old.extent, old.kind, body, None, old.annotations)


def cascaded(loop: Any, running: Callable[[Any], tuple[Any, Any] | None], along: str) -> Any:
    """A nest of loops over terms, as it is where it is not a long sum.

    Args:
        loop: the outermost.
        running: tells the kind and the element of ``acc = acc op e``.
        along: the mark of a loop along a vector.
    """
    plain = rebuild_for(loop, loop.extent, loop.body, marked=False)
    loops, inside = [loop], loop.body
    while isinstance(inside, tirx.For) and not inside.annotations:
        loops.append(inside)
        inside = inside.body
    leaf = _Leaf(inside, along)
    zeros = all(isinstance(each.min, tirx.IntImm) and int(each.min) == 0 for each in loops)
    if not zeros or not leaf.is_sum([each.loop_var for each in loops]):
        return plain
    found = running(leaf.store)
    if found is None or found[0] is not tirx.Add:
        return plain
    parts = Parts(leaf.part, leaf.clear, leaf.flush)
    adding: Adding = leaf.adding
    terms = leaf.terms
    for each in reversed(loops):

        def turn(i: Any, place: Any, adding: Adding = adding, var: Any = each.loop_var) -> Any:
            return Substitute({var: i}).stmt(adding(place))

        var = each.loop_var
        adding, terms = parts.loop(var.name, each.extent, var.ty.dtype, turn, terms)
    if not parts.allocated:
        return plain
    return tirx.SeqStmt([*parts.allocated, adding(None)])
