"""TVM's simplifiers, kept away from what they get wrong."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from .divisions import ROUNDED
from .hidden import hidden_from
from .tir import holds
from .wrapping import reads_data

_ARITHMETIC: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        tirx.Add,
        tirx.Sub,
        tirx.Mul,
        tirx.Div,
        tirx.EQ,
        tirx.NE,
        tirx.LT,
        tirx.LE,
        tirx.GT,
        tirx.GE,
    )
}
_DIVISIONS: dict[str, Any] = {"FloorDiv": tirx.floordiv, "FloorMod": tirx.floormod}


def on_indices(*passes: Any) -> list[Any]:
    """Passes that simplify, for indices and bounds alone.

    TVM takes floats for real numbers: ``x * 0`` and ``x - x`` become 0, ``x == x`` and
    ``x < 1 or x >= 1`` become true, of which NaN and infinities make none true. And it takes
    integers for numbers without end: ``x + 1 > x`` becomes true, ``x * 2 // 2`` becomes `x`.
    """
    return hidden_from(list(passes), "data", _ARITHMETIC, _is_data)


def _is_data(node: Any, bound: set[Any]) -> bool:
    """Whether a node computes with what a kernel reads, and not with indices."""
    if "float" in str(node.a.ty.dtype) or _is_unsigned(node):
        return True
    return reads_data(node, bound)


def _is_unsigned(node: Any) -> bool:
    """Whether a node subtracts unsigned numbers; TVM raises where the result would be below 0."""
    return isinstance(node, tirx.Sub) and str(node.ty.dtype).startswith("uint")


def flatten() -> list[Any]:
    """TVM's FlattenBuffer, with indices that run backwards as they are.

    Its map of iterators splits ``(2 - i) % 16`` into ``i % -16 * -1``: the start is lost. And it
    simplifies what is stored.
    """
    nodes = {**_DIVISIONS, "Sub": tirx.Sub}
    wanted = dict.fromkeys((*ROUNDED, tirx.Sub), lambda node: _is_backwards(node, set()))
    passes = [tirx.transform.FlattenBuffer()]
    return hidden_from(passes, "backwards", nodes, _is_backwards, wanted)


def _is_backwards(node: Any, _: set[Any]) -> bool:
    if isinstance(node, tirx.Sub):
        return _is_unsigned(node)
    # By a size that is not known it splits nothing, and what it simplifies there is needed.
    return isinstance(node.b, tirx.IntImm) and _falls(node.a)


def _falls(node: Any) -> bool:
    """Whether an expression subtracts, or has a negative number in it."""
    return holds(
        node,
        lambda part: (
            isinstance(part, tirx.Sub) or (isinstance(part, tirx.IntImm) and int(part.value) < 0)
        ),
    )
