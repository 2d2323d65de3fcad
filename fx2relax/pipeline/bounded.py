"""Vectors of sines and remainders: in registers where a whole vector is in range, else libm.

Far from zero, a sine takes more digits of pi than fit into the registers of a vector loop, and a
large quotient more digits than a float has. Such arguments are rare, and their vector is computed
element by element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

from . import polynomials_division
from .polynomials_circle import LIMIT
from .tir import Call, NotHandled, Rewriter, counted, extern, extern_name, is_guard, uses

PREFIX = "fx2relax.bounded."
_NAMES = ("tirx.sin", "tirx.cos", "tirx.tan")
_REMAINDERS = {"fmodf": "float32", "fmod": "float64"}


class _Bounded(Rewriter):
    """Puts functions of bounded range in the place of others, and tells when they do not hold."""

    def __init__(self) -> None:
        self.beyond: list[Any] = []
        self.bound: list[Any] = []

    def leave(self, node: Any) -> Any:
        if is_guard(node):
            raise NotHandled("an argument that is not always there")
        if isinstance(node, tirx.Let):
            self.bound.append(node.var)
        if not isinstance(node, Call):
            return node
        kind = str(getattr(node.ty, "dtype", ""))  # a pointer has none
        name = str(getattr(node.op, "name", ""))
        if name in _NAMES and kind == "float32":
            self.beyond.append(tirx.abs(node.args[0]) > tirx.const(LIMIT, kind))
            return extern(PREFIX + name.removeprefix("tirx."), node.args, node.ty)
        if _REMAINDERS.get(extern_name(node) or "") == kind:
            self.beyond.append(polynomials_division.beyond(*node.args[1:]))
            return extern(PREFIX + "fmod", node.args[1:], node.ty)
        return node

    def known(self) -> bool:
        """Whether no argument depends on a variable that the expression binds itself."""
        return not any(uses(b, var) for b in self.beyond for var in self.bound)


def bounded(store: Any, lanes: int, dtype: Any, at: Callable[[Any, Any], Any]) -> Any:
    """The loop over one vector of a store, or None where it holds no such function.

    Args:
        store: a statement.
        lanes: the length of a vector.
        dtype: that of the loop's variable.
        at: puts the index of a lane into a statement.
    """
    if not isinstance(store, tirx.BufferStore):
        return None
    rewriter = _Bounded()
    try:
        near = tirx.BufferStore(store.buffer, rewriter.expr(store.value), list(store.indices))
    except NotHandled:
        return None
    if not rewriter.beyond or not rewriter.known():
        return None
    one, zero = tirx.const(1, "int32"), tirx.const(0, "int32")
    far = tirx.decl_buffer((lanes,), "int32", "far")
    beyond = tirx.any(*rewriter.beyond)

    def vector(body: Callable[[Any], Any]) -> Any:
        return counted("lane", dtype, lanes, body, tirx.ForKind.VECTORIZED)

    marks = vector(lambda j: at(tirx.BufferStore(far, tirx.Select(beyond, one, zero), [j]), j))
    found = tirx.BufferLoad(far, [tirx.const(0, dtype)])
    for lane in range(1, lanes):
        found = found | tirx.BufferLoad(far, [tirx.const(lane, dtype)])
    fast = vector(lambda j: at(near, j))
    slow = counted("lane", dtype, lanes, lambda j: at(store, j))
    return tirx.SeqStmt([tirx.AllocBuffer(far), marks, tirx.IfThenElse(found == zero, fast, slow)])
