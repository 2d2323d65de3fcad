"""Schedules for CPU kernels: loops in an order that streams memory, shared by the cores, marked.

The marks (`vector.VECTOR`, `vector.REDUCE`) become vector code when the kernel is compiled. A
kernel that a rule cannot take gets the next simpler one; in the end it stays as it was written.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.ir.prim import expr_deep_equal

from .blocks import REDUCTION, SPATIAL, Block, contiguous, leading, row_axes
from .gemm import tile
from .inline import inline_steps
from .tir import uses
from .vector import REDUCE, VECTOR

_log = logging.getLogger(__name__)
# Below this much work a loop ends before a second thread has begun.
_WORTH_A_THREAD = 60_000
_CHUNK = 4096
_TILE = 16


def schedule_kernels(mod: Any, target: Any) -> Any:
    """Schedule every kernel of a module that carries no schedule yet."""
    threads = int(target.attrs.get("num-cores", 0)) or 1
    done = {
        name: tile(func, target) or _schedule(func, threads)
        for name, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc) and not func.attrs.get("tirx.is_scheduled")
    }
    mod = mod.clone()
    for name, func in done.items():
        mod[name] = func
    return mod


def _schedule(func: Any, threads: int) -> Any:
    for rule in (_rows_or_blocks, _outer_only):
        try:
            sch = s_tir.Schedule(tvm.IRModule({"main": func}), error_render_level="none")
            root = sch.get_sblock("root")
            if _runs_over_nothing(sch, root):
                return func
            rule(sch, root, threads)
            return sch.mod["main"].with_attr("tirx.is_scheduled", True)
        except Exception as error:
            # TVM's schedule errors have no common class; whatever happens, the kernel is valid.
            _log.debug("%s does not apply: %s", rule.__name__, str(error)[:500])
    return func


def _runs_over_nothing(sch: Any, root: Any) -> bool:
    """Whether a loop of a kernel has no turn, which TVM's transformations do not all expect."""
    return any(a.length == 0 for rv in sch.get_child_blocks(root) for a in Block(sch, rv).axes)


def _outer_only(sch: Any, root: Any, threads: int) -> None:
    """Share the outer data-parallel loops between the threads, and nothing else."""
    for rv in sch.get_child_blocks(root):
        block = Block(sch, rv)
        loops = sch.get_loops(rv)
        if len(loops) != len(block.axes) or not _worth(block.work, threads):
            continue
        outer = []
        for loop, axis in zip(loops, block.axes, strict=True):
            if axis.kind != SPATIAL:
                break
            outer.append(loop)
        if outer:
            sch.parallel(_fuse(sch, outer))


def _rows_or_blocks(sch: Any, root: Any, threads: int) -> None:
    blocks = inline_steps(sch, root)
    rows = _common_rows(blocks)
    if rows:
        _schedule_rows(sch, blocks, rows, threads)
        return
    for block in blocks:
        _schedule_block(sch, block, threads)


def _common_rows(blocks: list[Block]) -> int:
    """How many leading dimensions every step of the kernel shares; 0 where they do not chain."""
    if len(blocks) < 2 or not all(b.regular for b in blocks):
        return 0
    inner = [b.store.buffer for b in blocks[:-1] if b.store is not None]
    for n, buffer in enumerate(inner):
        if not any(b.loads_of(buffer) for b in blocks[n + 1 :]):
            return 0  # a second output
    count = min(
        leading(b, buffer)
        for b in blocks
        for buffer in inner
        if b.loads_of(buffer) or (b.store is not None and b.store.buffer.same_as(buffer))
    )
    last = blocks[-1]
    assert last.store is not None
    axes = row_axes(last, last.store.indices)[:count]
    lead = 0
    while lead < len(axes) and axes[lead] == lead:
        lead += 1
    return lead


def _schedule_rows(sch: Any, blocks: list[Block], rows: int, threads: int) -> None:
    """Compute every step for one row of the output at a time, so that it stays in cache."""
    last = blocks[-1]
    place = sch.get_loops(last.rv)[rows - 1]
    for block in reversed(blocks[:-1]):
        sch.compute_at(block.rv, place, preserve_unit_loops=True)
    work = sum(b.work for b in blocks)
    outer = _fuse(sch, sch.get_loops(last.rv)[:rows])
    if _worth(work, threads):
        sch.parallel(outer)
    for block in blocks:
        loops = sch.get_loops(block.rv)[1:]
        axes = block.axes[rows:] if block is last else block.axes
        if len(loops) != len(axes):
            raise ValueError(f"{block.name}: {len(loops)} loops for {len(axes)} axes")
        _inner(sch, block, dict(zip((a.var for a in axes), loops, strict=True)))


def _schedule_block(sch: Any, block: Block, threads: int) -> None:
    loops = sch.get_loops(block.rv)
    if len(loops) != len(block.axes):
        return
    by_axis = {a.var: loop for a, loop in zip(block.axes, loops, strict=True)}
    if not block.regular:
        _share(sch, [by_axis[a.var] for a in _prefix(block)], block, threads)
        return
    if block.reduces:
        _reduction(sch, block, by_axis, threads)
    else:
        _pointwise(sch, block, by_axis, threads)


def _prefix(block: Block) -> list[Any]:
    count = next((n for n, a in enumerate(block.axes) if a.kind != SPATIAL), len(block.axes))
    return block.axes[:count]


def _worth(work: float, threads: int) -> bool:
    return threads > 1 and work > _WORTH_A_THREAD


def _fuse(sch: Any, loops: list[Any]) -> Any:
    return sch.fuse(*loops) if len(loops) > 1 else loops[0]


def _share(sch: Any, loops: list[Any], block: Block, threads: int) -> None:
    if loops and _worth(block.work, threads):
        sch.parallel(_fuse(sch, loops))


def _pointwise(sch: Any, block: Block, loops: dict[Any, Any], threads: int) -> None:
    """Flatten dimensions that all accesses walk alike; share the outer, vectorise the inner."""
    assert block.store is not None
    axes = block.axes
    if not axes:
        return
    if not contiguous(block, block.store.indices, axes[-1].var):
        _share(sch, list(loops.values()), block, threads)
        return
    if _alternates(block):
        _pairs(sch, block, loops, threads)
        return
    strided = _strided_axis(block)
    if strided is not None:
        _transpose(sch, block, loops, strided, threads)
        return
    flat = _flat_suffix(block)
    inner = _fuse(sch, [loops[a.var] for a in axes[len(axes) - flat :]])
    outer = [loops[a.var] for a in axes[: len(axes) - flat]]
    if _worth(block.work, threads):
        rows = math.prod(a.length or math.inf for a in axes[: len(axes) - flat])
        if rows < 4 * threads:
            inner_length = math.prod(a.length or math.inf for a in axes[len(axes) - flat :])
            chunk = _CHUNK
            if math.isfinite(inner_length * rows):
                share = math.ceil(inner_length * rows / threads / max(rows, 1))
                chunk = max(-(-share // 64) * 64, 256)
            shared, inner = sch.split(inner, [None, chunk])
            outer.append(shared)
        sch.parallel(_fuse(sch, outer))
    sch.annotate(inner, VECTOR, 1)


def _alternates(block: Block) -> bool:
    """Whether every second element along the last axis is computed otherwise, as in pairs."""
    assert block.store is not None
    value, axis = block.store.value, block.axes[-1]
    if not isinstance(value, tirx.Select) or axis.length is None or axis.length % 2:
        return False
    zero, two = (tirx.const(n, axis.var.ty.dtype) for n in (0, 2))
    parity = axis.var if axis.length == 2 else tirx.FloorMod(axis.var, two)
    return bool(expr_deep_equal(value.condition, tirx.EQ(parity, zero)))


def _pairs(sch: Any, block: Block, loops: dict[Any, Any], threads: int) -> None:
    """Both elements of a pair at once; what is left of the loops is LLVM's to vectorise."""
    order = [loops[a.var] for a in block.axes]
    if block.axes[-1].length != 2:
        order[-1:] = sch.split(order[-1], [None, 2])
    sch.unroll(order.pop())
    if len(order) == 1 and _worth(block.work, threads):
        order = list(sch.split(order[0], [None, _CHUNK]))
    _share(sch, order[:-1], block, threads)


def _flat_suffix(block: Block) -> int:
    """How many trailing axes can be walked as one without a division in any index."""
    assert block.store is not None
    accesses = [list(block.store.indices), *(list(x.indices) for x in block.summary.loads)]
    axes = block.axes
    count = 1
    while count < len(axes):
        tail = [a.var for a in axes[len(axes) - count - 1 :]]
        if not all(_walks(indices, tail) for indices in accesses):
            break
        count += 1
    return count


def _walks(indices: list[Any], tail: list[Any]) -> bool:
    """Whether the indices end in exactly these axes, or mention none of them."""
    plain = len(indices) >= len(tail) and all(
        isinstance(i, tvm.ir.Var) and i.same_as(v)
        for i, v in zip(indices[len(indices) - len(tail) :], tail, strict=True)
    )
    rest = indices[: len(indices) - len(tail)] if plain else indices
    return not any(uses(i, v) for i in rest for v in tail)


def _strided_axis(block: Block) -> int | None:
    """The axis along which a load is contiguous while the store is not, for a transpose."""
    last = len(block.axes) - 1
    for load in block.summary.loads:
        for n, axis in enumerate(block.axes[:last]):
            if contiguous(block, load.indices, axis.var) and (axis.length or _TILE) >= 4:
                return n
    return None


def _transpose(sch: Any, block: Block, loops: dict[Any, Any], strided: int, threads: int) -> None:
    """Square tiles, so that each line of cache is read once."""
    axes = block.axes
    order = [loops[a.var] for n, a in enumerate(axes) if n not in (strided, len(axes) - 1)]
    rows, columns = loops[axes[strided].var], loops[axes[-1].var]
    r0, r1 = sch.split(rows, [None, _TILE])
    c0, c1 = sch.split(columns, [None, _TILE])
    sch.reorder(*order, r0, c0, r1, c1)
    _share(sch, [*order, r0], block, threads)


def _reduction(sch: Any, block: Block, loops: dict[Any, Any], threads: int) -> None:
    spatial = [a for a in block.axes if a.kind == SPATIAL]
    shared = [loops[a.var] for a in spatial]
    keep = _vector_axis(block)
    free = dict(loops)
    if keep is not None:
        shared = [loops[a.var] for a in spatial if a is not keep]
        rows = math.prod(a.length or math.inf for a in spatial if a is not keep)
        if rows < 4 * threads and _worth(block.work, threads):
            chunk, free[keep.var] = sch.split(loops[keep.var], [None, 64])
            shared.append(chunk)
    reduce = [free[a.var] for a in block.axes if a.kind == REDUCTION]
    kept = [] if keep is None else [free[keep.var]]
    sch.reorder(*shared, *reduce, *kept)
    if shared and _worth(block.work, threads):
        sch.parallel(_fuse(sch, shared))
    _inner(sch, block, {a.var: free[a.var] for a in block.axes if a.kind == REDUCTION or a is keep})


def _vector_axis(block: Block) -> Any:
    """The data-parallel axis to vectorise a reduction over, or None to vectorise the sum itself."""
    assert block.store is not None
    spatial = [a for a in block.axes if a.kind == SPATIAL]
    if not spatial:
        return None
    axis = spatial[-1]
    if axis.length is not None and axis.length < 8:
        return None
    if not contiguous(block, block.store.indices, axis.var):
        return None
    reduction = [a for a in block.axes if a.kind == REDUCTION]
    for load in block.operands():
        if contiguous(block, load.indices, axis.var):
            return axis
    if any(contiguous(block, x.indices, reduction[-1].var) for x in block.operands()):
        return None
    return axis


def _inner(sch: Any, block: Block, loops: dict[Any, Any]) -> None:
    """Order and mark the loops that one thread runs for a block."""
    assert block.store is not None
    axes = [a for a in block.axes if a.var in loops]
    if not axes:
        return
    spatial = [loops[a.var] for a in axes if a.kind == SPATIAL]
    reduce = [a for a in axes if a.kind == REDUCTION]
    if not reduce:
        if contiguous(block, block.store.indices, axes[-1].var):
            sch.annotate(loops[axes[-1].var], VECTOR, 1)
        return
    keep = _vector_axis(block)
    inner = [loops[a.var] for a in reduce]
    if keep is not None and keep.var in loops:
        kept = loops[keep.var]
        outer = [loops[a.var] for a in axes if a.kind == SPATIAL and a is not keep]
        sch.reorder(*outer, *inner, kept)
        init = sch.decompose_reduction(block.rv, inner[0])
        sch.annotate(sch.get_loops(init)[-1], VECTOR, 1)
        sch.annotate(sch.get_loops(block.rv)[-1], VECTOR, 1)
        return
    if spatial:
        sch.reorder(*spatial, *inner)
    flat = _flat_reduction(block, reduce)
    loop = _fuse(sch, inner[len(inner) - flat :])
    first = inner[0] if flat < len(inner) else loop
    sch.annotate(loop, REDUCE, 1)
    sch.decompose_reduction(block.rv, first)


def _flat_reduction(block: Block, reduce: list[Any]) -> int:
    """How many trailing reduction axes every load walks as one."""
    loads = [list(x.indices) for x in block.operands()]
    count = 1
    while count < len(reduce):
        tail = [a.var for a in reduce[len(reduce) - count - 1 :]]
        if not all(_walks(indices, tail) for indices in loads):
            break
        count += 1
    return count
