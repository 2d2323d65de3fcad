"""Kernels that no schedule takes, as they are written: slow where no loop is parallel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx

#: Of a block.
_THREADS = 256
_SBlock, _Realize = s_tir.stmt.SBlock, s_tir.stmt.SBlockRealize


def as_written(function: Any) -> Any:
    """A kernel whose statements are run in their order.

    An outermost loop that is parallel is shared among threads; all that stands between two of them
    is run by one thread. Each is a launch. What several of them use has memory of the GPU, which is
    allocated around them; all other memory is a thread's own.

    Args:
        function: without a schedule.
    """
    whole = function.body
    if not isinstance(whole, _Realize):
        made = function.with_body(_launched(_parts(whole), []))
        return _with_own_memory(made, set())
    root = whole.block
    parts = _parts(root.body)
    between = _shared(root.alloc_buffers, parts)
    block = _SBlock(
        root.iter_vars,
        root.reads,
        root.writes,
        root.name_hint,
        _launched(parts, between),
        root.init,
        root.alloc_buffers,
        root.match_buffers,
        root.annotations,
    )
    made = function.with_body(_Realize(whole.iter_values, whole.predicate, block))
    return _with_own_memory(made, set(between))


def _parts(body: Any) -> list[Any]:
    return [*body] if isinstance(body, tirx.SeqStmt) else [body]


def _launched(parts: Sequence[Any], between: Sequence[Any]) -> Any:
    """Statements in their order, in as many launches as it takes.

    Args:
        parts: the statements.
        between: buffers that one launch may write for the next. Others last for a statement.
    """
    launches: list[list[Any]] = []
    open_until = -1
    for index, part in enumerate(parts):
        alone = _is_parallel(part) and open_until < index
        before = launches[-1] if launches else []
        joined = before and not alone and not _is_parallel(before[0]) and not between
        if joined or (before and open_until >= index):
            before.append(part)
        else:
            launches.append([part])
        made = _defined(part)
        uses = [i for i, later in enumerate(parts) if made is not None and made in _vars(later)]
        open_until = max(open_until, *uses, index)
    found = [
        _over_threads(ps[0]) if len(ps) == 1 and _is_parallel(ps[0]) else _on_one(_sequence(ps))
        for ps in launches
    ]
    return _sequence(found)


def _defined(part: Any) -> Any:
    """The variable that a statement makes for those after it, or None."""
    if isinstance(part, (tirx.AllocBuffer, tirx.DeclBuffer)):
        return part.buffer
    return part.var if isinstance(part, tirx.Bind) else None


def _sequence(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else tirx.SeqStmt(list(parts))


def _is_parallel(part: Any) -> bool:
    return isinstance(part, tirx.For) and part.kind == tirx.ForKind.PARALLEL


def _over_threads(loop: Any) -> Any:
    """A parallel loop with a thread for each of its steps."""
    kind, size = loop.loop_var.ty.dtype, loop.extent
    block, thread = (tirx.Var(name, kind) for name in ("b", "t"))
    turn = block * tirx.const(_THREADS, kind) + thread
    body = tvm_ffi.structural_map(
        tvm_ffi.structural_map(loop.body, (tirx.For, _serial)),
        (tirx.Var, lambda var: loop.min + turn if var.same_as(loop.loop_var) else var),
    )
    body = tirx.IfThenElse(turn < size, body, None)
    blocks = tirx.floordiv(size + tirx.const(_THREADS - 1, kind), tirx.const(_THREADS, kind))
    return _bound(block, blocks, "blockIdx.x", _bound(thread, _THREADS, "threadIdx.x", body))


def _serial(loop: Any) -> Any:
    """A loop for a processor's threads or vectors as one of steps."""
    if loop.kind not in (tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED):
        return loop
    kind = tirx.ForKind.SERIAL
    return tirx.For(loop.loop_var, loop.min, loop.extent, kind, loop.body, step=loop.step)


def _on_one(body: Any) -> Any:
    """A statement in a grid of one block of one thread."""
    body = tvm_ffi.structural_map(body, (tirx.For, _serial))
    block, thread = (tirx.Var(name, "int32") for name in ("b", "t"))
    return _bound(block, 1, "blockIdx.x", _bound(thread, 1, "threadIdx.x", body))


def _bound(var: Any, size: Any, tag: str, body: Any) -> Any:
    kind = str(var.ty.dtype)
    size = tirx.const(size, kind) if isinstance(size, int) else size
    place = tirx.IterVar(None, tirx.Var(tag, kind), tirx.IterVar.ThreadIndex, tag)
    binding = tirx.ForKind.THREAD_BINDING
    return tirx.For(var, tirx.const(0, kind), size, binding, body, thread_binding=place)


def _shared(buffers: Sequence[Any], parts: Sequence[Any]) -> list[Any]:
    """Those of a kernel's buffers that several of its statements use."""
    uses = Counter(var for part in parts for var in _vars(part))
    return [buffer for buffer in buffers if uses[buffer] > 1]


def _vars(part: Any) -> set[Any]:
    used: set[Any] = set()
    tvm_ffi.structural_walk(part, (tirx.Var, used.add))
    return used


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
    function = function.with_attr("tirx.is_scheduled", True)
    if not own:
        return function
    return tvm_ffi.structural_map(function, (tirx.Var, lambda var: own.get(var, var)))
