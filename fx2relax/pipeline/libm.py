"""Functions of libm where TVM's or LLVM's own forms are wrong.

TVM makes a float64 tanh of exponentials, whose difference has no digits left near zero. LLVM takes
the result of ``fmod(x, y)`` for a number where `x` is never infinite and `y` never zero, and so
loses the NaN of either: it must not know the function by its name.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import tvm

from .tir import Call, Rewriter

_NAMES = {"fmod": "fmodf64", "fmodf": "fmodf32"}  # glibc's own
_extern = tvm.ir.Op.get("tirx.call_pure_extern")


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
        return Call(_extern, [tvm.ir.StringImm("tanh"), *node.args], ret_ty=node.ty)


class Renamed(Rewriter):
    """Calls functions by the names that LLVM does not know."""

    def leave(self, node: Any) -> Any:
        """A call after its operands."""
        if type(node) is not Call or not node.op.same_as(_extern):
            return node
        name, *operands = node.args
        other = _known().get(str(name.value))
        if other is None:
            return node
        return Call(_extern, [tvm.ir.StringImm(other), *operands], ret_ty=node.ty)
