"""Vectors of sines: polynomials where all arguments of a vector are in their range, else libm.

Far from zero, a sine takes more digits of pi than fit into the registers of a vector loop. Such
arguments are rare, and their vector is computed element by element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

from .polynomials_circle import LIMIT
from .tir import Call, NotHandled, Rewriter, counted, extern, is_guard

PREFIX = "fx2relax.bounded."
_NAMES = ("tirx.sin", "tirx.cos", "tirx.tan")


class _Bounded(Rewriter):
    """Puts functions of bounded range in the place of others, and keeps their arguments."""

    def __init__(self) -> None:
        self.arguments: list[Any] = []

    def leave(self, node: Any) -> Any:
        if isinstance(node, tirx.Let) or is_guard(node):
            raise NotHandled("an argument that is not always there")
        name = str(getattr(node.op, "name", "")) if isinstance(node, Call) else ""
        if name not in _NAMES or str(node.ty.dtype) != "float32":
            return node
        self.arguments.append(node.args[0])
        return extern(PREFIX + name.removeprefix("tirx."), node.args, node.ty)


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
    if not rewriter.arguments:
        return None
    one, zero = tirx.const(1, "int32"), tirx.const(0, "int32")
    limit = tirx.const(LIMIT, "float32")
    far = tirx.decl_buffer((lanes,), "int32", "far")
    beyond = tirx.any(*(tirx.abs(a) > limit for a in rewriter.arguments))

    def vector(body: Callable[[Any], Any]) -> Any:
        return counted("lane", dtype, lanes, body, tirx.ForKind.VECTORIZED)

    marks = vector(lambda j: at(tirx.BufferStore(far, tirx.Select(beyond, one, zero), [j]), j))
    found = tirx.BufferLoad(far, [tirx.const(0, dtype)])
    for lane in range(1, lanes):
        found = found | tirx.BufferLoad(far, [tirx.const(lane, dtype)])
    fast = vector(lambda j: at(near, j))
    slow = counted("lane", dtype, lanes, lambda j: at(store, j))
    return tirx.SeqStmt([tirx.AllocBuffer(far), marks, tirx.IfThenElse(found == zero, fast, slow)])
