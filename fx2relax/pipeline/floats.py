"""Keeps TVM's simplifier away from floating-point arithmetic.

It takes floats for real numbers: ``x * 0`` and ``x - x`` become 0, ``x == x`` and
``x < 1 or x >= 1`` become true, of which NaN and infinities make none true.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx

from .tir import Call, NotHandled, Rewriter

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


class _Kept(Rewriter):
    def visit_For(self, node: Any) -> Any:
        body = self.stmt(node.body)
        if body is node.body:
            return node
        return tirx.For(
            node.loop_var,
            node.min,
            node.extent,
            node.kind,
            body,
            node.thread_binding,
            node.annotations,
            node.step,
        )


class _Hide(_Kept):
    def leave(self, node: Any) -> Any:
        name = type(node).__name__
        if name not in _HIDDEN or "float" not in str(node.a.ty.dtype):
            return node
        label = tvm.ir.StringImm(_PREFIX + name)
        return Call(_extern, [label, node.a, node.b], ret_ty=node.ty)


class _Reveal(_Kept):
    def leave(self, node: Any) -> Any:
        if type(node) is not Call or not node.op.same_as(_extern):
            return node
        name = str(node.args[0].value)
        if not name.startswith(_PREFIX):
            return node
        return _HIDDEN[name.removeprefix(_PREFIX)](node.args[1], node.args[2])


def _pass(rewriter: type[Rewriter], name: str) -> Any:
    @tvm.tirx.transform.prim_func_pass(opt_level=0, name=name)  # type: ignore[untyped-decorator]
    def rewrite(func: Any, mod: Any, ctx: Any) -> Any:
        try:
            return func.with_body(rewriter().stmt(func.body))
        except NotHandled:
            return func

    return rewrite


def simplify() -> list[Any]:
    """TVM's simplifier of statements, for indices and bounds alone."""
    return [
        _pass(_Hide, "fx2relax.HideFloats"),
        tirx.transform.StmtSimplify(),
        _pass(_Reveal, "fx2relax.RevealFloats"),
    ]
