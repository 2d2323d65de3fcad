"""Indices of vectors as one ramp, where what a kernel reads is a part of them.

A row that an index names begins at a number in all lanes, to which its elements' places are added.
TVM's simplifier is kept away from what is read (see `simplify`), and its code generator loads lane
by lane wherever the index is not a ramp itself.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from .tir import Rewriter


class Ramps(Rewriter):
    """Adds what is the same in all lanes to where a ramp begins."""

    def leave(self, node: Any) -> Any:
        """A sum of a ramp and a broadcast, or a wider ramp."""
        if isinstance(node, tirx.Cast) and isinstance(node.value, tirx.Ramp):
            return _widened(node)
        if not isinstance(node, (tirx.Add, tirx.Sub)):
            return node
        a, b = node.a, node.b
        if isinstance(a, tirx.Broadcast) and isinstance(b, tirx.Ramp) and type(node) is tirx.Add:
            a, b = b, a
        if not isinstance(a, tirx.Ramp) or not isinstance(b, tirx.Broadcast):
            return node
        return tirx.Ramp(type(node)(a.base, b.value), a.stride, a.lanes)


def _widened(node: Any) -> Any:
    """A ramp of wider integers; one that counts memory does not overflow."""
    wide = str(node.ty.dtype).partition("x")[0]
    narrow = str(node.value.ty.dtype).partition("x")[0]
    if (narrow, wide) != ("int32", "int64"):
        return node
    ramp = node.value
    return tirx.Ramp(tirx.Cast(wide, ramp.base), tirx.Cast(wide, ramp.stride), ramp.lanes)
