"""Whether a kernel holds anything that a rewriter would change, before it walks through all of it.

TVM's own walk takes a fifteenth of the time of a `Rewriter`'s, and each kernel goes through twenty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Call
from tvm.ir.expr import TensorLoad

Wanted = Mapping[Any, Callable[[Any], bool]]


def present(stmt: Any, wanted: Wanted) -> bool:
    """Whether a statement holds a node of one of these classes of which its function is true.

    Args:
        stmt: the statement; buffers and types in it are looked into as well.
        wanted: the functions, by class.
    """
    entries = [(kind, _stopping(holds)) for kind, holds in wanted.items()]
    return tvm_ffi.structural_walk(stmt, entries, order="pre") is not None


def of_dtype(prefix: str) -> Wanted:
    """What there is in a kernel that computes with numbers of dtypes that begin so."""

    def is_one(node: Any) -> bool:
        return str(getattr(node.ty, "dtype", "")).startswith(prefix)

    return {
        **dict.fromkeys((TensorLoad, Call, tirx.Cast, tirx.FloatImm), is_one),
        **dict.fromkeys((tirx.Let, tirx.Bind), lambda node: is_one(node.var)),
    }


def always(_: Any) -> bool:
    """True of every node."""
    return True


def _stopping(holds: Callable[[Any], bool]) -> Callable[[Any], Any]:
    return lambda node: tvm_ffi.VisitInterrupt() if holds(node) else None
