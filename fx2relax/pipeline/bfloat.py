"""bfloat16 and float32 into one another by their bits, before TVM's BF16ComputeLegalize.

That pass does not look inside the value of a `Let` that is no bfloat16 itself: a cast in there
would later be taken for one from an unsigned integer. It also drops the rounding of a float32 that
becomes a bfloat16 and a float32 again.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx

from .tir import NotHandled, Rewriter, TensorLoad


class _Bits(Rewriter):
    def leave(self, node: Any) -> Any:
        if type(node) is not tirx.Cast or str(node.ty.dtype) != "float32":
            return node
        value = node.value
        if str(value.ty.dtype) != "bfloat16":
            return node
        if type(value) is TensorLoad:
            bits = tirx.Cast("uint32", tirx.reinterpret("uint16", value))
            return tirx.reinterpret("float32", bits << _u32(16))
        if type(value) is tirx.Cast and str(value.value.ty.dtype) == "float32":
            return rounded(value.value)
        return node


def rounded(value: Any) -> Any:
    """A float32 rounded to the nearest bfloat16, ties to even."""
    var = tirx.Var("wide", "float32")
    bits = tirx.reinterpret("uint32", var)
    odd = (bits >> _u32(16)) & _u32(1)
    near = tirx.reinterpret("float32", (bits + _u32(0x7FFF) + odd) & _u32(0xFFFF0000))
    return tirx.Let(var, value, tirx.Select(tirx.isnan(var), var, near))


def _u32(value: int) -> Any:
    return tirx.const(value, "uint32")


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="fx2relax.BFloat16Bits")
def bfloat16_bits(func: Any, mod: Any, ctx: Any) -> Any:
    """Casts between bfloat16 and float32 as operations on their bits."""
    try:
        return func.with_body(_Bits().stmt(func.body))
    except NotHandled:
        return func
