"""TVM's simplifiers, kept away from what they get wrong."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from .hidden import hidden_from
from .tir import holds

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


def simplify() -> list[Any]:
    """TVM's simplifier of statements, for indices and bounds alone.

    It takes floats for real numbers: ``x * 0`` and ``x - x`` become 0, ``x == x`` and
    ``x < 1 or x >= 1`` become true, of which NaN and infinities make none true.
    """
    return hidden_from(
        [tirx.transform.StmtSimplify()],
        "real",
        _ARITHMETIC,
        lambda node: "float" in str(node.a.ty.dtype),
    )


def flatten() -> list[Any]:
    """TVM's FlattenBuffer, with indices that run backwards as they are.

    Its map of iterators splits ``(2 - i) % 16`` into ``i % -16 * -1``: the start is lost.
    """
    return hidden_from(
        [tirx.transform.FlattenBuffer()],
        "backwards",
        _DIVISIONS,
        # By a size that is not known it splits nothing, and what it simplifies there is needed.
        lambda node: isinstance(node.b, tirx.IntImm) and _falls(node.a),
    )


def _falls(node: Any) -> bool:
    """Whether an expression subtracts, or has a negative number in it."""
    return holds(
        node,
        lambda part: (
            isinstance(part, tirx.Sub) or (isinstance(part, tirx.IntImm) and int(part.value) < 0)
        ),
    )
