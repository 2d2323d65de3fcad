"""How a tensor lies in memory: dense, permuted, or with elements that share a place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def dense_permutation(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """The axes from outermost to innermost in memory, if the tensor is dense and permuted.

    Returns None for a contiguous tensor and for one that is not dense (expanded, sliced).
    """
    rank = len(shape)
    if rank < 2 or any(size == 0 for size in shape):
        return None
    order = sorted(range(rank), key=lambda axis: (-strides[axis], axis if shape[axis] != 1 else -1))
    step = 1
    for axis in reversed(order):
        if shape[axis] != 1 and strides[axis] != step:
            return None
        step *= shape[axis]
    kept = [axis for axis in order if shape[axis] != 1]
    return None if kept == sorted(kept) else tuple(order)


def overlaps(val: torch.Tensor) -> bool:
    """Whether two elements of a strided tensor may lie in one place."""
    if val.layout is not torch.strided:
        return False
    reach = 0
    for stride, size in sorted(zip(concrete(val.stride()), concrete(val.shape), strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor is contiguous; the strides of axes of size 1 do not matter."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def is_compact(val: torch.Tensor) -> bool:
    """Whether a fake tensor's elements lie side by side, in whatever order of its axes."""
    shape, strides = concrete(val.shape), concrete(val.stride())
    return is_dense(shape, strides) or dense_permutation(shape, strides) is not None


def dense_strides(
    shape: Sequence[int], permutation: Sequence[int] | None = None
) -> tuple[int, ...]:
    """What PyTorch gives a compact tensor whose axes lie in that order, the outermost first."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(permutation or range(len(shape))):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


def inverse(permutation: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes another."""
    result = [0] * len(permutation)
    for position, axis in enumerate(permutation):
        result[axis] = position
    return tuple(result)


def storage_of(val: Any) -> int | None:
    """What identifies the memory that a fake tensor would have in eager."""
    if not isinstance(val, torch.Tensor) or val.layout is not torch.strided:
        return None
    return int(StorageWeakRef(val.untyped_storage()).cdata)


def same_storage(one: Any, other: Any) -> bool:
    """Whether two fake tensors would lie in the same memory."""
    storage = storage_of(one)
    return storage is not None and storage == storage_of(other)


def concrete(values: Sequence[Any]) -> list[int]:
    """Sizes or strides as ints; a symbolic one by the hint that it was captured with.

    A symbol that only the data tells counts as 2, in products as well.
    """
    return [_hint(v) for v in values]


def _hint(value: Any) -> int:
    if not isinstance(value, torch.SymInt):
        return int(value)
    node = value.node
    if node.hint is not None:
        return int(node.hint)
    env = node.shape_env
    # Its name in newer PyTorch, and the one before.
    known = getattr(env, "backed_var_to_val" if hasattr(env, "backed_var_to_val") else "var_to_val")
    return int(node.expr.xreplace({s: known.get(s, 2) for s in node.expr.free_symbols}))
