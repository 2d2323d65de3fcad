"""Schedules for CPU kernels: loops in an order that streams memory, shared by the cores, marked.

The marks (`vector.VECTOR`, `vector.REDUCE`) become vector code when the kernel is compiled. A
kernel that a rule cannot take gets the next simpler one; in the end it stays as it was written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import tvm
from tvm import s_tir, tirx

from ..compat import const_int
from ..marks import REPLACES
from .blocks import SPATIAL, Block
from .gemm import tile
from .in_place import replaces
from .inline import inline_steps
from .loops import fuse, share, worth
from .places import shorten
from .pointwise import pointwise
from .reduction import reduction
from .rows import common_rows, schedule_rows
from .vector import VECTOR

_log = logging.getLogger(__name__)


def schedule_kernels(mod: Any, target: Any, known: Callable[[Any, Any], Any] | None = None) -> Any:
    """Schedule every kernel of a module that carries no schedule yet.

    Args:
        mod: the module.
        target: a `tvm.target.Target`.
        known: gives a kernel, for a target, a schedule that goes before our rules, or None.
    """
    done = {
        name: (known(func, target) if known else None) or schedule(func, target)
        for name, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc) and not func.attrs.get("tirx.is_scheduled")
    }
    mod = mod.clone()
    for name, func in done.items():
        mod[name] = func
    return mod


def schedule(func: Any, target: Any) -> Any:
    """One kernel by our rules."""
    return tile(func, target) or _schedule(func, int(target.attrs.get("num-cores", 0)) or 1)


def _schedule(func: Any, threads: int) -> Any:
    func = shorten(func)
    for rule in (_rows_or_blocks, _outer_only):
        try:
            sch = s_tir.Schedule(tvm.IRModule({"main": func}), error_render_level="none")
            root = sch.get_sblock("root")
            if _runs_over_nothing(sch, root):
                return func
            replaced = rule(sch, root, threads)
            done = sch.mod["main"].with_attr("tirx.is_scheduled", True)
            places = [n for n, p in enumerate(done.params) if any(p.same_as(b) for b in replaced)]
            return done.with_attr(REPLACES, places) if places else done
        except Exception as error:
            # TVM's schedule errors have no common class; whatever happens, the kernel is valid.
            _log.debug("%s does not apply: %s", rule.__name__, str(error)[:500])
    return func


def _runs_over_nothing(sch: Any, root: Any) -> bool:
    """Whether a loop of a kernel has no turn, which TVM's transformations do not all expect."""
    blocks = [sch.get(rv) for rv in sch.get_child_blocks(root)]
    return any(const_int(v.dom.extent) == 0 for block in blocks for v in block.iter_vars)


def _outer_only(sch: Any, root: Any, threads: int) -> list[Any]:
    """Share the outer data-parallel loops between the threads, and nothing else."""
    for rv in sch.get_child_blocks(root):
        block = Block(sch, rv)
        loops = sch.get_loops(rv)
        if len(loops) != len(block.axes) or not worth(block.work, threads):
            continue
        outer = []
        for loop, axis in zip(loops, block.axes, strict=True):
            if axis.kind != SPATIAL:
                break
            outer.append(loop)
        if outer:
            sch.parallel(fuse(sch, outer))
    return []


def _rows_or_blocks(sch: Any, root: Any, threads: int) -> list[Any]:
    """Rows where there are any; returns the buffers whose place the result may take."""
    blocks = inline_steps(sch, root)
    rows = common_rows(blocks)
    if rows:
        schedule_rows(sch, blocks, rows, threads)
        return []
    in_order = [_schedule_block(sch, block, threads) for block in blocks]
    if in_order != [True]:
        return []
    return [buffer for buffer in blocks[0].reads if replaces(blocks[0], buffer)]


def _schedule_block(sch: Any, block: Block, threads: int) -> bool:
    """Schedule one step; returns whether its elements are made in order, each of them once."""
    loops = sch.get_loops(block.rv)
    if len(loops) != len(block.axes):
        return False
    by_axis = {a.var: loop for a, loop in zip(block.axes, loops, strict=True)}
    if not block.regular:
        share(sch, [by_axis[a.var] for a in _prefix(block)], block, threads)
    elif block.reduces:
        reduction(sch, block, by_axis, threads)
    else:
        found = pointwise(sch, block, by_axis, threads)
        for loop in found:
            sch.annotate(loop, VECTOR, 1)
        return bool(found)
    return False


def _prefix(block: Block) -> list[Any]:
    count = next((n for n, a in enumerate(block.axes) if a.kind != SPATIAL), len(block.axes))
    return block.axes[:count]
