"""Tensors joined along their last axis, a loop for each: no element asks where it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import s_tir, tirx
from tvm.ir import Range

_SBlock, _Realize = s_tir.stmt.SBlock, s_tir.stmt.SBlockRealize


def joined(shapes: Sequence[Sequence[int]], dtype: str) -> Any:
    """A kernel that takes tensors of these shapes, equal but for the last size, and joins them.

    No size is 0.
    """
    *outer, _ = shapes[0]
    whole = [*outer, sum(shape[-1] for shape in shapes)]
    parts = [tirx.decl_buffer(shape, dtype, f"part{n}") for n, shape in enumerate(shapes)]
    out = tirx.decl_buffer(whole, dtype, "joined")
    nests, start = [], 0
    for part, shape in zip(parts, shapes, strict=True):
        nests.append(_copied(part, out, shape, start))
        start += shape[-1]
    root = _SBlock([], [], [], "root", tirx.SeqStmt(nests) if len(nests) > 1 else nests[0])
    func = tirx.PrimFunc([*parts, out], _Realize([], True, root))
    return func.with_attrs({"tirx.noalias": True, "s_tir": True})


def _copied(part: Any, out: Any, shape: Sequence[int], start: int) -> Any:
    """The loops that copy one tensor to its place."""
    axes, loops = [], []
    for n, size in enumerate(shape):
        axes.append(tirx.IterVar(Range(_wide(0), _wide(size)), tirx.Var(f"v{n}", "int64"), 0))
        loops.append(tirx.Var(f"i{n}", "int64"))
    source = [axis.var for axis in axes]
    target = [*source[:-1], source[-1] + _wide(start)]
    one = _wide(1)
    block = _SBlock(
        axes,
        [tirx.BufferRegion(part, [Range.from_min_extent(i, one) for i in source])],
        [tirx.BufferRegion(out, [Range.from_min_extent(i, one) for i in target])],
        "joined",
        tirx.BufferStore(out, tirx.BufferLoad(part, source), target),
    )
    nest: Any = _Realize(loops, True, block)
    for loop, size in zip(reversed(loops), reversed(shape), strict=True):
        nest = tirx.For(loop, _wide(0), _wide(size), tirx.ForKind.SERIAL, nest)
    return nest


def _wide(number: int) -> Any:
    return tirx.const(number, "int64")
