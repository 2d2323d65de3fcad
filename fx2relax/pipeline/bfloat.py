"""bfloat16 as what it is: float32 in registers, its upper half in memory.

TVM's BF16ComputeLegalize does not look inside the value of a `Let`, repeats the operand of every
cast, so that a chain of them grows as a power of two, and drops the rounding of a float32 that
becomes a bfloat16 and a float32 again. After this pass it finds nothing left to do.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx

from .present import of_dtype
from .tir import NotHandled, Rewriter, TensorLoad

BF16, F32 = "bfloat16", "float32"
LARGEST = 3.3895313892515355e38
#: What there is in a kernel that computes in bfloat16.
HALF = of_dtype(BF16)


def dtype_of(node: Any) -> str:
    """The dtype of an expression; empty for one that is no number."""
    return str(getattr(node.ty, "dtype", ""))


class WidenBFloat16(Rewriter):
    """Computes in float32 whatever was bfloat16; loads widen, stores round."""

    def __init__(self) -> None:
        self._vars: dict[Any, Any] = {}

    def expr(self, node: Any) -> Any:
        """A variable that held a bfloat16 holds its float32."""
        if type(node) is tirx.Let and dtype_of(node.var) == BF16:
            wide = tirx.Var(node.var.name, F32)
            self._vars[node.var] = wide
            return tirx.Let(wide, self.expr(node.value), self.expr(node.body))
        return super().expr(node)

    def leave(self, node: Any) -> Any:
        """The float32 in the place of an expression that is a bfloat16 still."""
        if dtype_of(node) != BF16:
            return node
        if isinstance(node, TensorLoad):
            return _widened(tirx.reinterpret("uint16", node))
        if isinstance(node, tirx.FloatImm):
            return tirx.const(float(node.value), F32)
        if isinstance(node, tirx.Cast):
            return _rounded(tirx.Cast(F32, node.value))
        if isinstance(node, tvm.ir.Var) and node in self._vars:
            return self._vars[node]
        raise NotHandled(f"{type(node).__name__} of bfloat16")

    def call(self, node: Any, args: list[Any]) -> Any:
        """A call; one that gave a bfloat16 gives a float32."""
        name = getattr(node.op, "name", "")
        if name == "tirx.reinterpret":
            if dtype_of(node) == BF16:
                return _widened(args[0])
            if dtype_of(node.args[0]) == BF16:
                return _narrowed(args[0])
        if dtype_of(node) == BF16:
            known = name.startswith(("tirx.", "prim."))
            if not known or name in ("tirx.call_extern", "tirx.call_packed"):
                raise NotHandled(f"{name} of bfloat16")
            return tvm.ir.Call(node.op, args, node.attrs, list(node.ty_args), ret_ty=F32)
        return super().call(node, args)

    def visit_BufferStore(self, node: Any) -> Any:
        """A store; one of bfloat16 rounds."""
        if str(node.buffer.dtype) != BF16:
            return self.store(node)
        if isinstance(node.value, tirx.FloatImm) and abs(float(node.value.value)) == LARGEST:
            # The neutral element of a max or min; see `vectormath`.
            bits = 0x7F80 if float(node.value.value) > 0 else 0xFF80
            infinite = tirx.reinterpret(BF16, tirx.const(bits, "uint16"))
            return tirx.BufferStore(node.buffer, infinite, list(node.indices))
        if isinstance(node.value, TensorLoad):  # a copy keeps all bits, those of NaN too
            source = [self.expr(x) for x in node.value.indices]
            bits = tirx.reinterpret("uint16", tirx.BufferLoad(node.value.source, source))
            indices = [self.expr(x) for x in node.indices]
            return tirx.BufferStore(node.buffer, tirx.reinterpret(BF16, bits), indices)
        value, *indices = (self.expr(x) for x in (node.value, *node.indices))
        # TVM's storage pass knows bfloat16 as the type of this very node.
        return tirx.BufferStore(node.buffer, tirx.reinterpret(BF16, _narrowed(value)), indices)

    def visit_Bind(self, node: Any) -> Any:
        """A variable of the statements that follow."""
        if dtype_of(node.var) != BF16:
            return self.bind(node)
        value = self.expr(node.value)
        wide = tirx.Var(node.var.name, F32)
        self._vars[node.var] = wide
        return tirx.Bind(wide, value)


class Broadcast(Rewriter):
    """Puts the bits of a bfloat16 into all lanes, and only then calls them bfloat16.

    TVM's storage pass looks for that at the top of a stored value; its vectorizer, which finds the
    same value in all lanes, puts the broadcast there.
    """

    def leave(self, node: Any) -> Any:
        """The two in the other order."""
        if type(node) is not tirx.Broadcast or not dtype_of(node).startswith(BF16):
            return node
        value = node.value
        if getattr(getattr(value, "op", None), "name", "") != "tirx.reinterpret":
            return node
        return tirx.reinterpret(dtype_of(node), tirx.Broadcast(value.args[0], node.lanes))


def _u32(value: int) -> Any:
    return tirx.const(value, "uint32")


def _widened(bits: Any) -> Any:
    """A float32 from the bits of a bfloat16."""
    return tirx.reinterpret(F32, tirx.Cast("uint32", bits) << _u32(16))


def _upper_half(value: Any) -> Any:
    """The nearest bfloat16's bits, ties to even, NaN kept, in the lower half of a uint32."""
    wide, var = tirx.Var("wide", F32), tirx.Var("bits", "uint32")
    even = (var >> _u32(16)) & _u32(1)
    nan = tirx.Not(tirx.GE(wide, wide))
    near = (var + even + _u32(0x7FFF)) >> _u32(16)
    bits = tirx.Select(nan, _u32(0x7FC0), near)
    return tirx.Let(wide, value, tirx.Let(var, tirx.reinterpret("uint32", wide), bits))


def _narrowed(value: Any) -> Any:
    return tirx.Cast("uint16", _upper_half(value))


def _rounded(value: Any) -> Any:
    return tirx.reinterpret(F32, _upper_half(value) << _u32(16))
