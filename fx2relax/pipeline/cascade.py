"""Long sums of floating-point numbers as sums of sums.

A running sum rounds each time to its own size: of a million equal terms, a float32 gets the second
digit wrong. Like PyTorch, a sum here has few terms, each of which is such a sum of what lies side
by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx

from .tir import Substitute, counted, length_of, rebuild_for, uses

CASCADE = "fx2relax.cascade"
TERMS = 32  # of a sum that is left as it is
# Sums whose length is not known have larger blocks and so many levels: more would cost the short.
_LARGER, _LEVELS = 64, 2
_LANES = 16  # of a vector; what is left of it is added up one by one in the end

#: How two results over parts are joined.
JOINS: dict[Any, Callable[[Any, Any], Any]] = {
    tirx.Add: lambda a, b: a + b,
    tirx.Mul: lambda a, b: a * b,
    tirx.Max: tirx.max,
    tirx.Min: tirx.min,
}
#: Tells the kind and the element of ``acc = acc op e``; None of what is no such statement.
Running = Callable[[Any], "tuple[Any, Any] | None"]

#: The statement that adds something to a `Place`.
Adding = Callable[[Any], Any]
#: The same for one turn of a loop.
Turn = Callable[[Any, Any], Any]


def identity(kind: Any, dtype: str) -> Any:
    """What joined to anything changes nothing."""
    if kind in (tirx.Add, tirx.Mul):
        return tirx.const(int(kind is tirx.Mul), dtype)
    return tirx.min_value(dtype) if kind is tirx.Max else tirx.max_value(dtype)


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
        length = length_of(extent)
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


@dataclass
class Row:
    """A part of a buffer."""

    buffer: Any
    first: Any


#: Where something is added to: to a buffer, or a row of one; None stands for the result.
Place = Any


class Leaf:
    """What is inside all loops over terms: adds to one place, or to those along a vector.

    Products and extremes are sums of their own kind here.

    Args:
        node: the statement.
        along: the mark of a loop along a vector.
        running: see `Running`.

    Attributes:
        kind: one of those in `JOINS`; None of what is none of them.
    """

    def __init__(self, node: Any, along: str, running: Running) -> None:
        self.loop: Any = node if isinstance(node, tirx.For) else None
        body = node if self.loop is None else node.body
        self.guard = None
        if isinstance(body, tirx.IfThenElse) and body.else_case is None:
            self.guard, body = body.condition, body.then_case
        self.store: Any = body
        self.vector = self.loop is not None and along in self.loop.annotations
        found = running(body) if isinstance(body, tirx.BufferStore) else None
        self.kind: Any = found[0] if found is not None and found[0] in JOINS else None
        self._element: Any = found[1] if found is not None else None

    @property
    def terms(self) -> int:
        """How many numbers it adds to a place, one after the other."""
        if self.loop is None or self.vector:
            return 1
        length = length_of(self.loop.extent)
        return length if length is not None and length < 2 * _LANES else _LANES

    def is_apart(self, varying: list[Any]) -> bool:
        """Whether the place it adds to does not depend on these variables."""
        store = self.store
        if not isinstance(store, tirx.BufferStore):
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

    def clear(self, part: Place) -> Any:
        """The statement by which that holds the result of no terms."""
        buffer, at = self._at(part)
        nothing = identity(self.kind, str(buffer.dtype))
        return self._along(lambda: tirx.BufferStore(buffer, nothing, at))

    def flush(self, part: Place, place: Place) -> Any:
        """The statement that adds it to another place."""
        value = tirx.BufferLoad(*self._at(part))
        return self._along(lambda: self._guarded(self._plus(place, value)))

    def adding(self, place: Place) -> Any:
        """What it does, with another place."""
        body = self._guarded(self._plus(place, self._element))
        return body if self.loop is None else self._with_own_variable(body)

    def _at(self, place: Place) -> tuple[Any, list[Any]]:
        if place is None:
            return self.store.buffer, list(self.store.indices)
        own: Any = self.loop.loop_var if self.vector else tirx.const(0, "int32")
        if isinstance(place, Row):
            return place.buffer, [place.first + own if self.vector else place.first]
        return place, [own]

    def _plus(self, place: Place, value: Any) -> Any:
        buffer, at = self._at(place)
        return tirx.BufferStore(buffer, JOINS[self.kind](tirx.BufferLoad(buffer, at), value), at)

    def _guarded(self, store: Any) -> Any:
        return store if self.guard is None else tirx.IfThenElse(self.guard, store, None)

    def _along(self, body: Callable[[], Any]) -> Any:
        return self._with_own_variable(body()) if self.vector else body()

    def _with_own_variable(self, body: Any) -> Any:
        old = self.loop
        var = tirx.Var(old.loop_var.name, old.loop_var.ty.dtype)
        body = Substitute({old.loop_var: var}).stmt(body)
        return tirx.For(var, old.min, old.extent, old.kind, body, None, old.annotations)


def sum_of(loop: Any, running: Running, along: str) -> tuple[list[Any], Leaf] | None:
    """A nest of loops over terms and what is inside; None where there is no `Leaf.kind`.

    Args:
        loop: see `cascaded`, as for the others.
        running: the same.
        along: the same.
    """
    loops, inside = [loop], loop.body
    while isinstance(inside, tirx.For) and not inside.annotations:
        loops.append(inside)
        inside = inside.body
    leaf = Leaf(inside, along, running)
    zeros = all(isinstance(each.min, tirx.IntImm) and int(each.min) == 0 for each in loops)
    if leaf.kind is None or not zeros or not leaf.is_apart([each.loop_var for each in loops]):
        return None
    return loops, leaf


def cascaded(loop: Any, running: Running, along: str) -> Any:
    """A nest of loops over terms, as it is where it is not a long sum.

    Args:
        loop: the outermost.
        running: see `Running`.
        along: the mark of a loop along a vector.
    """
    plain = rebuild_for(loop, loop.extent, loop.body, marked=False)
    found = sum_of(loop, running, along)
    if found is None:
        return plain
    loops, leaf = found
    if leaf.kind is not tirx.Add or not str(leaf.store.buffer.dtype).startswith("float"):
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
