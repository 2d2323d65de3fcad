"""A hash of the elements of a tensor, whatever their order."""

from __future__ import annotations

from typing import Any

import torch

from .common import Unsupported, cast, converts, dtype, is_float, op, product, reshape, shape, tirx
from .opaque import is_large, local, loops, opaque, require, wide

aten = torch.ops.aten


@converts(aten.hash_tensor.default)
def hash_tensor(self: Any, dim: Any = (), *, keepdim: bool = False, mode: int = 0) -> Any:
    """The exclusive or of the elements' bits: of doubles, or of 64-bit integers."""
    if mode != 0:
        raise Unsupported("another mode, as in eager")
    sizes, rank = shape(self), len(shape(self))
    axes = {d % max(rank, 1) for d in (dim if isinstance(dim, (list, tuple)) else [dim])}
    axes = axes & set(range(rank)) or set(range(rank))
    if any(isinstance(sizes[a], int) and sizes[a] == 0 for a in axes):
        raise Unsupported("nothing to hash, as in eager")
    kept = [a for a in range(rank) if a not in axes]
    order = [*kept, *sorted(axes)]
    moved = self if order == list(range(rank)) else op.permute_dims(self, order)
    rows, length = product([sizes[a] for a in kept]), product([sizes[a] for a in sorted(axes)])
    held = "float64" if is_float(self) else "int64"

    def bits(value: Any) -> Any:
        return (
            tirx.reinterpret("uint64", value) if held == "float64" else tirx.Cast("uint64", value)
        )

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        count, size = numbers
        if not isinstance(size, int):
            message = "hash_tensor: Expected reduction dim to have non-zero size."
            require(wide(size) > wide(0), message, "IndexError")
        with loops([count], parallel=0 if is_large(product(numbers)) else None) as (row,):
            total = local("uint64")
            total[0] = tirx.const(0, "uint64")
            with loops([size]) as (i,):
                total[0] = total[0] ^ bits(ins[0][row * wide(size) + i])
            outs[0][row] = total[0]

    if dtype(self) == "uint64":
        raise Unsupported("uint64")
    x = cast(moved, held)
    flat = opaque("hash_tensor", body, [x], lambda n: [(n[0], "uint64")], [rows, length])
    left = [1 if a in axes else s for a, s in enumerate(sizes) if keepdim or a not in axes]
    return reshape(flat, left)
