"""Schedules for CPU kernels: every kernel gets the first rule that applies to it."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import s_tir, tirx


def schedule_kernels(mod: Any, target: Any) -> Any:
    """Schedule each kernel of a module; one that no rule can schedule stays as it is."""
    done: dict[Any, Any] = {}
    for name, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc) and not func.attrs.get("tirx.is_scheduled"):
            done[name] = _schedule(func)
    mod = mod.clone()
    for name, func in done.items():
        mod[name] = func
    return mod


def _schedule(func: Any) -> Any:
    try:
        sch = s_tir.Schedule(tvm.IRModule({"main": func}), error_render_level="none")
        root = sch.get_sblock("root")
        inline(sch, root)
        for block in sch.get_child_blocks(root):
            parallel_outer(sch, block)
    except Exception:
        return func
    return sch.mod["main"]


def inline(sch: Any, root: Any) -> None:
    changed = True
    while changed:
        changed = False
        for block in sch.get_child_blocks(root):
            try:
                sch.compute_inline(block)
                changed = True
            except Exception:
                continue


def parallel_outer(sch: Any, block: Any) -> None:
    loops = sch.get_loops(block)
    iters = sch.get(block).iter_vars
    n = 0
    for loop, it in zip(loops, iters, strict=False):
        if it.iter_type != 0:
            break
        n += 1
    if n:
        sch.parallel(sch.fuse(*loops[:n]))
