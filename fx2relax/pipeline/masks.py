"""Remainders by powers of two, which LLVM's loop vectorizer gets wrong."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from .tir import NotHandled, Rewriter


def holds_masks(mod: Any) -> bool:
    """Whether `has_masks` holds for a kernel of a lowered module."""
    return any(has_masks(f) for _, f in mod.functions_items() if isinstance(f, tirx.PrimFunc))


def has_masks(kernel: Any) -> bool:
    """Whether a kernel takes a remainder by a power of two.

    LLVM 22 makes ``i & 3`` a number of two bits, forgets that it starts over, and reads 16 elements
    in a row for ``x[i & 3]``.
    """
    search = _Search()
    try:
        search.stmt(kernel.body)
    except NotHandled:
        return True
    return search.found


class _Search(Rewriter):
    def __init__(self) -> None:
        self.found = False

    def leave(self, node: Any) -> Any:
        if isinstance(node, tirx.BitwiseAnd):
            self.found = True
        elif isinstance(node, (tirx.FloorMod, tirx.Mod)):
            by = node.b.value if isinstance(node.b, tirx.IntImm) else None
            self.found = self.found or (by is not None and by & (by - 1) == 0)
        return node

    def visit_SBlockRealize(self, node: Any) -> Any:
        for value in node.iter_values:
            self.expr(value)
        self.stmt(node.block.body)
        if node.block.init is not None:
            self.stmt(node.block.init)
        return node
