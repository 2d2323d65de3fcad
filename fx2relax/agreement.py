"""Sizes that PyTorch knows to be equal and TVM cannot prove so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fx2relax.casting import resized
from fx2relax.compat import BlockBuilder, Expr, is_prim_expr, shape_values
from fx2relax.shapes import SymbolTable

# The axis along which factors are multiplied.
_INNER = 0


def agreed(values: Sequence[Any], apart: int | None = None) -> list[Any]:
    """Tensors of sizes that agree, each size written as a number if any of them has one.

    Otherwise as in the first tensor that has it. PyTorch has found that the sizes agree; that they
    do is checked when the program runs.

    Args:
        values: Relax tensors; whatever else is among them is left as it is.
        apart: an axis, counted from the last (-1), along which they are joined: all others agree.
            Without it they broadcast together, and a size of 1 agrees with any.
    """

    def axes(rank: int) -> list[int | None]:
        return [axis if axis != apart else None for axis in range(-rank, 0)]

    return _agreed([(value, axes) for value in values], broadcast=apart is None)


def agreed_factors(left: Any, right: Any) -> list[Any]:
    """The same for the factors of a product of vectors, matrices, or batches of matrices."""

    def columns(rank: int) -> list[int | None]:
        return [*range(-rank, -2), *([None] if rank > 1 else []), _INNER]

    def rows(rank: int) -> list[int | None]:
        return [*range(-rank, -2), _INNER, *([None] if rank > 1 else [])]

    return _agreed([(left, columns), (right, rows)], broadcast=True)


def _agreed(labelled: Sequence[tuple[Any, Any]], broadcast: bool) -> list[Any]:
    """Tensors whose axes of one label agree; those of label None do not have to."""
    builder = BlockBuilder.current()
    found = []
    for value, axes in labelled:
        value = builder.normalize(value) if _is_tensor(value) else value
        sizes = shape_values(value.ty) if _is_tensor(value) else None
        found.append((value, sizes, [] if sizes is None else axes(len(sizes))))
    known: dict[int | None, Any] = {}
    for _, sizes, labels in found:
        for size, label in zip(sizes or (), labels, strict=True):
            spreads = broadcast and label != _INNER and isinstance(size, int) and size == 1
            if isinstance(size, int) and not spreads:
                known.setdefault(label, size)
    evident = SymbolTable()  # Relax knows nothing of the ranges of sizes
    result = []
    for value, sizes, labels in found:
        if sizes is not None and not all(isinstance(s, int) for s in sizes):
            wanted = [
                size if label is None else _size(known, label, size, evident)
                for size, label in zip(sizes, labels, strict=True)
            ]
            if any(a is not b for a, b in zip(sizes, wanted, strict=True)):
                value = resized(value, wanted)
        result.append(value)
    return result


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Expr) and not is_prim_expr(value)


def _size(known: dict[int | None, Any], label: int, size: Any, evident: SymbolTable) -> Any:
    if isinstance(size, int):
        return size
    first = known.setdefault(label, size)
    return size if evident.equal(first, size) else first
