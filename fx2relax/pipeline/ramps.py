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
        kind = type(node)
        if kind is tirx.Cast:
            return _widened(node) if type(node.value) is tirx.Ramp else node
        if kind not in (tirx.Add, tirx.Sub):
            return node
        a, b = node.a, node.b
        if type(a) is tirx.Broadcast and type(b) is tirx.Ramp and kind is tirx.Add:
            a, b = b, a
        if type(a) is not tirx.Ramp or type(b) is not tirx.Broadcast:
            return node
        return tirx.Ramp(kind(a.base, b.value), a.stride, a.lanes)


def _widened(node: Any) -> Any:
    """A ramp of wider integers; one that counts memory does not overflow."""
    wide = str(node.ty.dtype).partition("x")[0]
    narrow = str(node.value.ty.dtype).partition("x")[0]
    if (narrow, wide) != ("int32", "int64"):
        return node
    ramp = node.value
    return tirx.Ramp(tirx.Cast(wide, ramp.base), tirx.Cast(wide, ramp.stride), ramp.lanes)
