"""Sizes that PyTorch knows to be equal and TVM cannot prove so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fx2relax.bounds import equal
from fx2relax.casting import resized
from fx2relax.compat import BlockBuilder, Expr, is_prim_expr, shape_values


def agreed(values: Sequence[Any], apart: int | None = None) -> list[Any]:
    """Tensors that broadcast together, each size written as in the first tensor that has it.

    PyTorch has found that the sizes agree; that they do is checked when the program runs.

    Args:
        values: Relax tensors; whatever else is among them is left as it is.
        apart: an axis, counted from the last (-1), along which the sizes need not agree.
    """
    builder = BlockBuilder.current()
    known: dict[int, Any] = {}
    result = []
    for value in values:
        if isinstance(value, Expr) and not is_prim_expr(value):
            value = builder.normalize(value)
            sizes = shape_values(value.ty)
            if sizes is not None and not all(isinstance(s, int) for s in sizes):
                wanted = [_size(known, i - len(sizes), s, apart) for i, s in enumerate(sizes)]
                if any(a is not b for a, b in zip(sizes, wanted, strict=True)):
                    value = resized(value, wanted)
            elif sizes is not None:
                for i, s in enumerate(sizes):
                    _size(known, i - len(sizes), s, apart)
        result.append(value)
    return result


def _size(known: dict[int, Any], axis: int, size: Any, apart: int | None) -> Any:
    if axis == apart or (isinstance(size, int) and size == 1):
        return size
    first = known.setdefault(axis, size)
    fixed = isinstance(first, int) and isinstance(size, int)
    return size if fixed or equal(first, size) else first
