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

    Where one outermost statement writes what another reads, each is a launch, so that this has
    memory of the GPU, which is allocated around them. All other memory is the thread's own.

    Args:
        function: without a schedule.
    """
    function = tvm_ffi.structural_map(function, (tirx.For, _serial))
    whole, between = function.body, list[Any]()
    if isinstance(whole, _Realize):
        root = whole.block
        parts = [*root.body] if isinstance(root.body, tirx.SeqStmt) else [root.body]
        between = _shared(root.alloc_buffers, parts)
        launches = [_launched(p) for p in parts] if between else [_launched(root.body)]
        block = _SBlock(
            root.iter_vars,
            root.reads,
            root.writes,
            root.name_hint,
            launches[0] if len(launches) == 1 else tirx.SeqStmt(launches),
            root.init,
            root.alloc_buffers,
            root.match_buffers,
            root.annotations,
        )
        made = function.with_body(_Realize(whole.iter_values, whole.predicate, block))
    else:
        made = function.with_body(_launched(whole))
    return _with_own_memory(made, set(between)).with_attr("tirx.is_scheduled", True)


def _serial(loop: Any) -> Any:
    """A loop for a processor's threads or vectors as one of steps."""
    if loop.kind not in (tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED):
        return loop
    kind = tirx.ForKind.SERIAL
    return tirx.For(loop.loop_var, loop.min, loop.extent, kind, loop.body, step=loop.step)


def _launched(body: Any) -> Any:
    """A statement in a grid of one block of one thread."""
    for tag in ("threadIdx.x", "blockIdx.x"):
        place = tirx.IterVar(None, tirx.Var(tag, "int32"), tirx.IterVar.ThreadIndex, tag)
        var = tirx.Var(tag[0], "int32")
        body = tirx.For(var, 0, 1, tirx.ForKind.THREAD_BINDING, body, thread_binding=place)
    return body


def _shared(buffers: Sequence[Any], parts: Sequence[Any]) -> list[Any]:
    """Those of a kernel's buffers that several of its statements use."""
    uses: Counter[Any] = Counter()
    for part in parts:
        used: set[Any] = set()
        tvm_ffi.structural_walk(part, (tirx.Var, used.add))
        uses.update(used)
    return [buffer for buffer in buffers if uses[buffer] > 1]


def _with_own_memory(function: Any, shared: set[Any]) -> Any:
    """The kernel with the buffers that it allocates, but those given, in a thread's memory."""
    made: list[Any] = []
    tvm_ffi.structural_walk(
        function.body,
        [
            (_SBlock, lambda block: made.extend(block.alloc_buffers)),
            (tirx.AllocBuffer, lambda node: made.append(node.buffer)),
        ],
    )
    own = {
        buffer: tirx.decl_buffer(buffer.shape, buffer.dtype, buffer.name, scope="local")
        for buffer in made
        if buffer not in shared and buffer.scope() in ("", "global")
    }
    if not own:
        return function
    return tvm_ffi.structural_map(function, (tirx.Var, lambda var: own.get(var, var)))
