"""Indices of vectors as one ramp, where what a kernel reads is a part of them.

A row that an index names begins at a number in all lanes, to which its elements' places are added.
TVM's simplifier is kept away from what is read (see `simplify`), and its code generator loads lane
by lane wherever the index is not a ramp itself.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from .tir import Rewriter


def is_ramp(node: Any) -> bool:
    """Whether a node is a ramp, written otherwise."""
    kind = type(node)
    if kind is tirx.Cast:
        return type(node.value) is tirx.Ramp
    pair = type(node.a), type(node.b)
    return pair == (tirx.Ramp, tirx.Broadcast) or (
        pair == (tirx.Broadcast, tirx.Ramp) and kind is tirx.Add
    )


#: Where there may be one.
RAMPS = dict.fromkeys((tirx.Cast, tirx.Add, tirx.Sub), is_ramp)


class Ramps(Rewriter):
    """Adds what is the same in all lanes to where a ramp begins."""

    def leave(self, node: Any) -> Any:
        """A sum of a ramp and a broadcast, or a wider ramp."""
        kind = type(node)
        if kind not in RAMPS or not is_ramp(node):
            return node
        if kind is tirx.Cast:
            return _widened(node)
        a, b = node.a, node.b
        if type(a) is tirx.Broadcast:
            a, b = b, a
        return tirx.Ramp(kind(a.base, b.value), a.stride, a.lanes)


def _widened(node: Any) -> Any:
    """A ramp of wider integers; one that counts memory does not overflow."""
    wide = str(node.ty.dtype).partition("x")[0]
    narrow = str(node.value.ty.dtype).partition("x")[0]
    if (narrow, wide) != ("int32", "int64"):
        return node
    ramp = node.value
    return tirx.Ramp(tirx.Cast(wide, ramp.base), tirx.Cast(wide, ramp.stride), ramp.lanes)
