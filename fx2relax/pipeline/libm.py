"""Functions of libm where TVM's or LLVM's own forms are wrong.

TVM makes a float64 tanh of exponentials, whose difference has no digits left near zero. LLVM takes
the result of ``fmod(x, y)`` for a number where `x` is never infinite and `y` never zero, and so
loses the NaN of either: it must not know the function by its name.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from .tir import Rewriter, extern, extern_name

_NAMES = {"fmod": "fmodf64", "fmodf": "fmodf32"}  # glibc's own


@functools.cache
def _known() -> dict[str, str]:
    """The names that this process can resolve; elsewhere than with glibc there are none."""
    process = ctypes.CDLL(None)
    return {name: other for name, other in _NAMES.items() if hasattr(process, other)}


class Doubles(Rewriter):
    """Calls libm's tanh for float64; comes before loops are made vectors."""

    def leave(self, node: Any) -> Any:
        """A call after its operands."""
        if getattr(getattr(node, "op", None), "name", "") != "tirx.tanh":
            return node
        if str(node.ty.dtype) != "float64":
            return node
        return extern("tanh", node.args, node.ty)


def has_another_name(node: Any) -> bool:
    """Whether a node calls one of the functions that `Renamed` knows."""
    return extern_name(node) in _known()


class Renamed(Rewriter):
    """Calls functions by the names that LLVM does not know."""

    def leave(self, node: Any) -> Any:
        """A call after its operands."""
        other = _known().get(extern_name(node) or "")
        return node if other is None else extern(other, node.args[1:], node.ty)
