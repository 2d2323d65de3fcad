"""Kernels that take tensors wherever they lie.

TVM promises LLVM that each tensor begins at a multiple of 64 bytes, and does not look: a tensor
that begins elsewhere (a slice) ends the process. Kernels here ask for no more than elements in
their own places. Vector loads of any address cost the same where the address happens to be good.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="fx2relax.Unaligned")  # type: ignore[untyped-decorator]
def unaligned(func: Any, mod: Any, ctx: Any) -> Any:
    """Take back what `MakePackedAPI` has promised of the addresses of a kernel's arguments."""
    body = _without_promises(func.body)
    return func if body is func.body else func.with_body(body)


def _without_promises(stmt: Any) -> Any:
    """A statement without those in front of the kernel's own."""
    if isinstance(stmt, tirx.SeqStmt):
        parts = [_without_promises(part) for part in stmt.seq]
        same = all(a is b for a, b in zip(parts, stmt.seq, strict=True))
        return stmt if same else tirx.SeqStmt(parts)
    if not isinstance(stmt, tirx.AttrStmt) or stmt.attr_key == "compute_scope":
        return stmt
    body = _without_promises(stmt.body)
    if stmt.attr_key == "storage_alignment":
        return body
    same = body is stmt.body
    return stmt if same else tirx.AttrStmt(stmt.node, stmt.attr_key, stmt.value, body)
