"""Sums, means and maxima over bags of rows of a table, and their gradients."""

from __future__ import annotations

from typing import Any

import torch

from .common import (
    cast,
    compute_dtype,
    converts,
    dtype,
    emit,
    op,
    relax,
    reshape,
    shape,
    shape_expr,
    tirx,
)
from .data_dependent import counter
from .indices import checked
from .opaque import T, fill, is_large, loops, opaque, require, wide

aten = torch.ops.aten

_SUM, _MEAN, _MAX = 0, 1, 2


def _bounds(offsets: Any, bag: Any, given: Any, count: Any, closed: bool) -> tuple[Any, Any]:
    """Where a bag's indices start and end; `closed` says that the last end is given too."""
    start, after = wide(offsets[bag]), bag + wide(1)
    if closed:
        return start, wide(offsets[after])
    last = wide(offsets[tirx.min(after, wide(given) - 1)])
    return start, tirx.Select(after < wide(given), last, wide(count))


def bags(
    weight: Any,
    indices: Any,
    offsets: Any,
    mode: int,
    scale: Any,
    closed: bool,
    padding: int,
) -> tuple[Any, Any, Any, Any]:
    """The bags' results (in float32 at least), sizes, maxima's rows or None, each index's bag."""
    rows, width = shape(weight)
    given, count = shape(offsets)[0], shape(indices)[0]
    number = given - 1 if closed else given
    message = "embedding_bag: expected an index within the table"
    row_at = checked([indices], [rows], wrap=False, message=message, kind="RuntimeError")
    kind = dtype(weight)
    wider = compute_dtype(kind)
    parallel = 0 if is_large(count * width) else None

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        many, inner, entries, bag_count = numbers
        table, index, starts = ins[:3]
        out, sizes, owner = outs[:3]
        best = outs[3] if mode == _MAX else None
        bad = counter()
        with loops([bag_count]) as (b,):
            start, end = _bounds(starts, b, entries, many, closed)
            wrong = tirx.Or(tirx.Or(start < 0, end < start), end > wide(many))
            wrong = tirx.Or(wrong, tirx.And(b.equal(wide(0)), tirx.NE(start, wide(0))))
            bad[0] += tirx.Cast("int64", wrong)
        require(bad[0].equal(wide(0)), "embedding_bag: offsets must rise from 0 to the last index")
        fill(owner, many, lambda _: wide(0))
        with loops([bag_count], parallel) as (b,):
            sizes[b] = wide(0)
            with loops([inner]) as (d,):
                out[b * inner + d] = tirx.const(0, wider)
                if best is not None:
                    best[b * inner + d] = wide(0)
            start, end = _bounds(starts, b, entries, many, closed)
            with T.serial(start, end) as i:
                owner[i] = b
                with T.If(tirx.NE(index[i], wide(padding))), T.Then():
                    with loops([inner]) as (d,):
                        at = b * inner + d
                        value = table[index[i] * inner + d]
                        value = value if wider == kind else tirx.Cast(wider, value)
                        if best is not None:
                            larger = tirx.Or(sizes[b].equal(wide(0)), value > out[at])
                            best[at] = tirx.Select(larger, index[i], best[at])
                            out[at] = tirx.Select(larger, value, out[at])
                        else:
                            if scale is not None:
                                factor = ins[3][i]
                                value = value * tirx.Cast(wider, factor)
                            out[at] = out[at] + value
                    sizes[b] = sizes[b] + wide(1)
            if mode == _MEAN:
                with loops([inner]) as (d,):
                    divisor = tirx.Cast(wider, tirx.max(sizes[b], wide(1)))
                    out[b * inner + d] = out[b * inner + d] / divisor

    def outputs(numbers: list[Any]) -> list[tuple[Any, str]]:
        many, inner, _, bag_count = numbers
        full = bag_count * inner
        found = [(full, wider), (bag_count, "int64"), (many, "int64")]
        return [*found, (full, "int64")] if mode == _MAX else found

    inputs = [weight, row_at, offsets, *([] if scale is None else [scale])]
    found = opaque("embedding_bag", body, inputs, outputs, [count, width, given, number])
    out, sizes, owner, *best = (
        emit(relax.TupleGetItem(found, k)) for k in range(3 + (mode == _MAX))
    )
    of_maxima = reshape(best[0], [number, width]) if best else None
    return reshape(cast(out, kind), [number, width]), sizes, of_maxima, owner


def _forward(
    weight: Any,
    indices: Any,
    offsets: Any,
    mode: int,
    scale: Any,
    closed: bool,
    padding: int,
    forward_only: bool,
) -> Any:
    out, sizes, best, owner = bags(weight, indices, offsets, mode, scale, closed, padding)
    kind = dtype(offsets)
    # As eager does on a CPU: no owners for plain sums, no counts for sums, and rows of maxima for
    # maxima alone; for means the counts again.
    plain = mode == _SUM and dtype(weight) in ("float32", "float16") and padding < 0
    number = shape(sizes)[0]
    owners = op.zeros(shape_expr([0]), kind) if plain else cast(owner, kind)
    counts = cast(sizes, kind) if mode != _SUM else op.zeros(shape_expr([number]), kind)
    rows = cast(best, kind) if mode == _MAX else counts
    if forward_only and closed:
        counts = op.concat([counts, op.zeros(shape_expr([1]), kind)], 0)
    return out, owners, counts, rows


@converts(aten._embedding_bag_forward_only.default)
def embedding_bag_forward_only(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """Sum, mean or maximum of each bag of rows; an empty bag gives 0."""
    closed, scale = include_last_offset, per_sample_weights
    return _forward(weight, indices, offsets, mode, scale, closed, padding_idx, True)


@converts(aten._embedding_bag.default)
def embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """`embedding_bag_forward_only`, with what the gradient needs."""
    closed, scale = include_last_offset, per_sample_weights
    return _forward(weight, indices, offsets, mode, scale, closed, padding_idx, False)
