"""Kernels that no schedule takes, on one thread of a GPU: slow, and right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx

_SBlock, _Realize = s_tir.stmt.SBlock, s_tir.stmt.SBlockRealize


def on_one_thread(function: Any) -> Any:
    """A kernel whose statements one thread runs in their order.

    Each of its outermost statements is a launch, so that what one writes for the next has memory
    that is allocated between them. What one statement alone uses is the thread's own.

    Args:
        function: without a schedule.
    """
    function = tvm_ffi.structural_map(function, (tirx.For, _serial))
    whole = function.body
    if isinstance(whole, _Realize):
        root = whole.block
        parts = [*root.body] if isinstance(root.body, tirx.SeqStmt) else [root.body]
        block = _SBlock(
            root.iter_vars,
            root.reads,
            root.writes,
            root.name_hint,
            _in_order([_launched(part) for part in parts]),
            root.init,
            root.alloc_buffers,
            root.match_buffers,
            root.annotations,
        )
        whole = _Realize(whole.iter_values, whole.predicate, block)
        made = _with_own_memory(function.with_body(whole), root.alloc_buffers, parts)
    else:
        made = function.with_body(_launched(whole))
    return made.with_attr("tirx.is_scheduled", True)


def _serial(loop: Any) -> Any:
    """A loop for a processor's threads or vectors as one of steps."""
    if loop.kind not in (tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED):
        return loop
    kind = tirx.ForKind.SERIAL
    return tirx.For(loop.loop_var, loop.min, loop.extent, kind, loop.body, step=loop.step)


def _in_order(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else tirx.SeqStmt(list(parts))


def _launched(body: Any) -> Any:
    """A statement in a grid of one block of one thread."""
    for tag in ("threadIdx.x", "blockIdx.x"):
        place = tirx.IterVar(None, tirx.Var(tag, "int32"), tirx.IterVar.ThreadIndex, tag)
        var = tirx.Var(tag[0], "int32")
        body = tirx.For(var, 0, 1, tirx.ForKind.THREAD_BINDING, body, thread_binding=place)
    return body


def _with_own_memory(function: Any, buffers: Sequence[Any], parts: Sequence[Any]) -> Any:
    """The kernel with those of its buffers in a thread's memory that one part alone uses."""
    uses: Counter[Any] = Counter()
    for part in parts:
        used: set[Any] = set()
        tvm_ffi.structural_walk(part, (tirx.Var, used.add))
        uses.update(used)
    own = {
        buffer: tirx.decl_buffer(buffer.shape, buffer.dtype, buffer.name, scope="local")
        for buffer in buffers
        if uses[buffer] < 2 and buffer.scope() in ("", "global")
    }
    if not own:
        return function
    return tvm_ffi.structural_map(function, (tirx.Var, lambda var: own.get(var, var)))
