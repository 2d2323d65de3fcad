"""What the rules of `cpu` have in common: loops joined, shared by threads, walked alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm

from .blocks import Axis, Block
from .tir import uses

# Below this much work a loop ends before a second thread has begun.
_WORTH_A_THREAD = 60_000


def worth(work: float, threads: int) -> bool:
    """Whether so much work is done sooner by several threads."""
    return threads > 1 and work > _WORTH_A_THREAD


def fuse(sch: Any, loops: list[Any]) -> Any:
    """One loop of several."""
    return sch.fuse(*loops) if len(loops) > 1 else loops[0]


def share(sch: Any, loops: list[Any], block: Block, threads: int) -> None:
    """Give the turns of some outer loops to the threads, if that is worth it."""
    if loops and worth(block.work, threads):
        sch.parallel(fuse(sch, loops))


def walked_as_one(axes: Sequence[Axis], accesses: Sequence[list[Any]]) -> int:
    """How many trailing axes every access walks as one."""
    count = 1
    while count < len(axes):
        tail = axes[len(axes) - count - 1 :]
        if not all(_walks(indices, tail) for indices in accesses):
            break
        count += 1
    return count


def walk_together(axes: Sequence[Axis], indices: list[Any]) -> bool:
    """Whether indices have axes side by side, in their order, or mention none of them."""
    variables = [a.var for a in axes]
    for n in range(len(indices) - len(variables) + 1):
        part = indices[n : n + len(variables)]
        pairs = zip(part, variables, strict=True)
        if all(isinstance(i, tvm.ir.Var) and i.same_as(v) for i, v in pairs):
            indices = [*indices[:n], *indices[n + len(variables) :]]
            break
    return not any(uses(i, v) for i in indices for v in variables)


def _walks(indices: list[Any], axes: Sequence[Axis]) -> bool:
    """Whether the indices end in exactly these axes, or see them as one number or not at all."""
    tail = [a.var for a in axes]
    plain = len(indices) >= len(tail) and all(
        isinstance(i, tvm.ir.Var) and i.same_as(v)
        for i, v in zip(indices[len(indices) - len(tail) :], tail, strict=True)
    )
    rest = indices[: len(indices) - len(tail)] if plain else indices
    if not any(uses(i, v) for i in rest for v in tail):
        return True
    return all(_sees_one(i, axes) for i in indices)


def _sees_one(index: Any, axes: Sequence[Axis]) -> bool:
    """Whether an index adds axes up with the strides of a compact tensor, or mentions none."""
    tail = [a.var for a in axes]
    if not any(uses(index, v) for v in tail):
        return True
    found = tvm.sym.detect_linear_equation(index, tail)
    if not found:
        return False
    bounds = tvm.sym.Analyzer()
    pairs = zip(found[:-2], found[1:-1], axes[1:], strict=True)
    return all(bounds.can_prove_equal(outer, inner * a.extent) for outer, inner, a in pairs)
