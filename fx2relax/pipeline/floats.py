"""Keeps TVM's simplifier away from floating-point arithmetic.

It takes floats for real numbers: ``x * 0`` and ``x - x`` become 0, ``x == x`` and
``x < 1 or x >= 1`` become true, of which NaN and infinities make none true.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx

from .tir import Call, Rewriter, kernel_pass

_PREFIX = "fx2relax.real."
_HIDDEN: dict[str, Any] = {
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
_extern = tvm.ir.Op.get("tirx.call_pure_extern")


class _Hide(Rewriter):
    def leave(self, node: Any) -> Any:
        name = type(node).__name__
        if name not in _HIDDEN or "float" not in str(node.a.ty.dtype):
            return node
        label = tvm.ir.StringImm(_PREFIX + name)
        return Call(_extern, [label, node.a, node.b], ret_ty=node.ty)


class _Reveal(Rewriter):
    def leave(self, node: Any) -> Any:
        if type(node) is not Call or not node.op.same_as(_extern):
            return node
        name = str(node.args[0].value)
        if not name.startswith(_PREFIX):
            return node
        return _HIDDEN[name.removeprefix(_PREFIX)](node.args[1], node.args[2])


def simplify() -> list[Any]:
    """TVM's simplifier of statements, for indices and bounds alone."""
    return [
        kernel_pass("fx2relax.HideFloats", lambda func: _Hide().stmt(func.body)),
        tirx.transform.StmtSimplify(),
        kernel_pass("fx2relax.RevealFloats", lambda func: _Reveal().stmt(func.body)),
    ]
