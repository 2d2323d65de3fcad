"""What TVM's schedules for GPUs get wrong: it is taken out of a kernel before, or found after."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx

from ..compat import const_int

_SBlock, _Realize = s_tir.stmt.SBlock, s_tir.stmt.SBlockRealize
_SPATIAL, _REDUCTION = tirx.IterVar.DataPar, tirx.IterVar.CommReduce


def without_single_steps(function: Any) -> Any:
    """A kernel in which a reduction of one element is no reduction.

    A schedule that inlines what follows a reduction takes one over a single element for a block
    that writes once, and puts what follows into its beginning as well.
    """
    return tvm_ffi.structural_map(function, (_SBlock, _once))


def _once(block: Any) -> Any:
    reduced = [axis for axis in block.iter_vars if int(axis.iter_type) == _REDUCTION]
    if block.init is None or any(const_int(axis.dom.extent) != 1 for axis in reduced):
        return block
    begun, body = block.init, block.body
    if not (isinstance(begun, tirx.BufferStore) and isinstance(body, tirx.BufferStore)):
        return block

    def read(load: Any) -> Any:
        return begun.value if load.source.same_as(body.buffer) else load

    value = tvm_ffi.structural_map(body.value, (ir.TensorLoad, read))
    axes = [tirx.IterVar(axis.dom, axis.var, _SPATIAL) for axis in block.iter_vars]
    reads = [region for region in block.reads if not region.source.same_as(body.buffer)]
    return _SBlock(
        axes,
        reads,
        block.writes,
        block.name_hint,
        tirx.BufferStore(body.buffer, value, body.indices),
        None,
        block.alloc_buffers,
        block.match_buffers,
        block.annotations,
    )


def loses_guards(function: Any) -> bool:
    """Whether threads share a reduction of which not every thread has a part.

    The result is then written by those that have none as well, beyond the end of its memory.
    """
    threads: set[Any] = set()
    found: list[Any] = []

    def loop(node: Any) -> None:
        if node.kind == tirx.ForKind.THREAD_BINDING:
            threads.add(node.loop_var)

    tvm_ffi.structural_walk(function.body, [(tirx.For, loop), (_Realize, found.append)])
    return any(_is_guarded(realize, threads) for realize in found)


def _is_guarded(realize: Any, threads: set[Any]) -> bool:
    block = realize.block
    if block.init is None or const_int(realize.predicate) == 1:
        return False
    shared = [
        value
        for axis, value in zip(block.iter_vars, realize.iter_values, strict=True)
        if int(axis.iter_type) == _REDUCTION
    ]
    return any(threads.intersection(tirx.analysis.undefined_vars(value)) for value in shared)
