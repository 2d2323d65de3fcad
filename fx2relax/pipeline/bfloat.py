"""bfloat16 to float32 by its bits, before TVM's BF16ComputeLegalize.

That pass does not look inside the value of a `Let` that is no bfloat16 itself: a cast in there
would later be taken for one from an unsigned integer.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx

from .tir import NotHandled, Rewriter


class _Bits(Rewriter):
    def leave(self, node: Any) -> Any:
        if type(node) is not tirx.Cast or str(node.ty.dtype) != "float32":
            return node
        if str(node.value.ty.dtype) != "bfloat16":
            return node
        bits = tirx.Cast("uint32", tirx.reinterpret("uint16", node.value))
        return tirx.reinterpret("float32", bits << tirx.const(16, "uint32"))


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="fx2relax.WidenBFloat16")
def widen_bfloat16(func: Any, mod: Any, ctx: Any) -> Any:
    """Casts of bfloat16 to float32 as shifts of their bits."""
    try:
        return func.with_body(_Bits().stmt(func.body))
    except NotHandled:
        return func
