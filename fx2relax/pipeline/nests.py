"""Loops and index arithmetic over sizes that are known, or not, when a kernel is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx

from .blocks import Axis
from .vector import VECTOR

INDEX = "int64"
SERIAL, PARALLEL = tirx.ForKind.SERIAL, tirx.ForKind.PARALLEL


def number(value: Any) -> Any:
    """An index as an expression."""
    return tirx.const(value, INDEX) if isinstance(value, int) else value


def loop(
    name: str,
    extent: Any,
    body: Callable[[Any], Any],
    kind: Any = SERIAL,
    marks: dict[str, Any] | None = None,
) -> Any:
    """A loop from 0; ``body(variable)`` gives its statement."""
    if isinstance(extent, int) and extent == 1 and kind is SERIAL:
        return body(number(0))
    var = tirx.Var(name, INDEX)
    return tirx.For(var, number(0), number(extent), kind, body(var), None, marks or {})


def vectors(extent: Any, body: Callable[[Any], Any]) -> Any:
    """A loop of any extent over contiguous elements."""
    return loop("column", extent, body, marks={VECTOR: 1})


def lanes(count: int, body: Callable[[Any], Any]) -> Any:
    """A loop that is one vector."""
    return loop("lane", count, body, tirx.ForKind.VECTORIZED)


def in_turn(statements: Sequence[Any]) -> Any:
    """One statement of some."""
    return statements[0] if len(statements) == 1 else tirx.SeqStmt(list(statements))


def size(axis: Axis) -> Any:
    """An axis' length, an int where it is known."""
    return axis.extent if axis.length is None else axis.length


def product(sizes: Sequence[Any]) -> Any:
    """The product of sizes."""
    result: Any = 1
    for s in sizes:
        result = result * s
    return result


def quotient(a: Any, b: int) -> Any:
    """``a // b`` of a size."""
    return a // b if isinstance(a, int) else tirx.floordiv(a, number(b))


def parts(whole: Any, part: int) -> Any:
    """How many parts of a size there are, the last one perhaps smaller."""
    return quotient(whole + (part - 1), part)


def part_from(whole: Any, first: Any, part: int) -> Any:
    """How much of a size is in the part that begins at `first`, a multiple of `part`."""
    if isinstance(whole, int) and (whole % part == 0 or whole < part):
        return min(whole, part)
    return tirx.min(number(part), number(whole) - first)


def split(flat: Any, axes: Sequence[Axis]) -> dict[Any, Any]:
    """The value of each axis where all of them, taken as one, have this one."""
    values: dict[Any, Any] = {}
    for n, axis in reversed(list(enumerate(axes))):
        if n == 0:
            values[axis.var] = number(flat)
        elif axis.length == 1:
            values[axis.var] = number(0)
        else:
            values[axis.var] = tirx.floormod(flat, number(size(axis)))
            flat = tirx.floordiv(flat, number(size(axis)))
    return values
