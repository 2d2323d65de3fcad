"""Sizes that PyTorch knows to be equal and TVM cannot prove so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fx2relax.casting import resized
from fx2relax.compat import BlockBuilder, Expr, is_prim_expr, shape_values
from fx2relax.shapes import SymbolTable


def agreed(values: Sequence[Any], apart: int | None = None) -> list[Any]:
    """Tensors of sizes that agree, each size written as a number if any of them has one.

    Otherwise as in the first tensor that has it. PyTorch has found that the sizes agree; that they
    do is checked when the program runs.

    Args:
        values: Relax tensors; whatever else is among them is left as it is.
        apart: an axis, counted from the last (-1), along which they are joined: all others agree.
            Without it they broadcast together, and a size of 1 agrees with any.
    """
    builder = BlockBuilder.current()
    values = [builder.normalize(value) if _is_tensor(value) else value for value in values]
    shapes = [shape_values(value.ty) if _is_tensor(value) else None for value in values]
    known: dict[int, Any] = {}
    for sizes in shapes:
        for axis, size in enumerate(sizes or ()):
            if isinstance(size, int) and (size != 1 or apart is not None):
                known.setdefault(axis - len(sizes or ()), size)
    evident = SymbolTable()  # Relax knows nothing of the ranges of sizes
    result = []
    for value, sizes in zip(values, shapes, strict=True):
        if sizes is not None and not all(isinstance(s, int) for s in sizes):
            wanted = [
                s if i - len(sizes) == apart else _size(known, i - len(sizes), s, evident)
                for i, s in enumerate(sizes)
            ]
            if any(a is not b for a, b in zip(sizes, wanted, strict=True)):
                value = resized(value, wanted)
        result.append(value)
    return result


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Expr) and not is_prim_expr(value)


def _size(known: dict[int, Any], axis: int, size: Any, evident: SymbolTable) -> Any:
    if isinstance(size, int):
        return size
    first = known.setdefault(axis, size)
    return size if evident.equal(first, size) else first
