"""Distinct elements: sorted, then each run of equal ones counted and written once."""

from __future__ import annotations

from typing import Any

import torch

from .common import (
    converts,
    dtype,
    emit,
    op,
    product,
    relax,
    reshape,
    shape,
    shape_expr,
    tirx,
)
from .data_dependent import as_size, counter
from .opaque import T, loops, opaque, wide
from .ordering import sorted_with_index
from .unique_slices import distinct

aten = torch.ops.aten

# What TVM's code for a kernel of statements cannot compare is compared as another dtype.
_COMPARED = {"bool": "uint8", "float16": "float32", "bfloat16": "float32"}


def _starts(x: Any, i: Any) -> Any:
    """Whether a run starts at an element: each NaN is a run of its own."""
    return tirx.Or(i.equal(wide(0)), tirx.Select(_equal(x, i), wide(0), wide(1)).equal(wide(1)))


def _equal(x: Any, i: Any) -> Any:
    pair = x[tirx.max(i - 1, wide(0))], x[i]
    held = _COMPARED.get(str(pair[0].ty.dtype))
    before, after = (tirx.Cast(held, v) for v in pair) if held else pair
    return before.equal(after)


def _runs(ordered: Any, places: Any, inverse_shape: list[Any]) -> tuple[Any, Any, Any]:
    """Of a vector whose equal elements are neighbours: one of each, where they went, how many.

    Args:
        ordered: the vector.
        places: where each of its elements stood, or None for where it stands.
        inverse_shape: the shape of the second result.
    """
    kind, total = dtype(ordered), shape(ordered)[0]

    def measure(ins: Any, outs: Any, numbers: list[Any]) -> None:
        outs[0][0] = wide(0)
        with loops(numbers) as (i,):
            outs[0][0] += tirx.Cast("int64", _starts(ins[0], i))

    count = as_size(opaque("count_runs", measure, [ordered], lambda _: [(1, "int64")], [total]))

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        values, inverse, counts = outs
        run = counter()
        with loops([numbers[0]]) as (i,):
            with T.If(_starts(ins[0], i)), T.Then():
                values[run[0]] = ins[0][i]
                counts[run[0]] = wide(0)
                run[0] += wide(1)
            at = ins[1][i] if places is not None else i
            inverse[at] = run[0] - wide(1)
            counts[run[0] - wide(1)] += wide(1)

    inputs = [ordered] if places is None else [ordered, places]
    results = opaque(
        "unique",
        body,
        inputs,
        lambda n: [(n[1], kind), (n[0], "int64"), (n[1], "int64")],
        [total, count],
    )
    values, inverse, counts = (relax.TupleGetItem(results, k) for k in range(3))
    return values, reshape(inverse, inverse_shape), counts


def _sorted_runs(x: Any) -> tuple[Any, Any, Any]:
    ordered, places = sorted_with_index(reshape(x, [product(shape(x))]), 0, descending=False)
    return _runs(emit(ordered), emit(places), shape(x))


def _none() -> Any:
    return op.zeros(shape_expr([0]), "int64")


@converts(aten._unique2.default)
def unique2(
    self: Any, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Any, Any, Any]:
    """Distinct elements in ascending order; NaN differs from NaN, and comes last."""
    values, inverse, counts = _sorted_runs(self)
    return values, inverse if return_inverse else _none(), counts if return_counts else _none()


@converts(aten._unique.default)
def unique(self: Any, sorted: bool = True, return_inverse: bool = False) -> tuple[Any, Any]:
    """`unique2` without the counts."""
    values, inverse, _ = _sorted_runs(self)
    return values, inverse if return_inverse else _none()


@converts(aten.unique_consecutive.default)
def unique_consecutive(
    self: Any, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[Any, Any, Any]:
    """One of each run of equal neighbours: of the elements, or of the slices along an axis."""
    if dim is not None:
        return distinct(self, dim, False)
    flat = reshape(self, [product(shape(self))])
    values, inverse, counts = _runs(flat, None, shape(self))
    return values, inverse if return_inverse else _none(), counts if return_counts else _none()
