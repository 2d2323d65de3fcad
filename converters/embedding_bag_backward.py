"""Gradients of bags of rows: of the table and of the weights of its samples."""

from __future__ import annotations

from typing import Any

import torch

from .common import (
    Unsupported,
    cast,
    compute_dtype,
    converts,
    dtype,
    product,
    relax,
    reshape,
    shape,
    te,
    te_call,
    tirx,
)
from .opaque import T, fill, local, loops, opaque, wide

aten = torch.ops.aten

_SUM, _MEAN, _MAX = 0, 1, 2


def owners(indices: Any, offsets: Any) -> Any:
    """The bag of each index; empty bags own none."""

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        many, given = numbers
        starts, owner = ins[0], outs[0]
        fill(owner, many, lambda _: wide(0))
        with loops([given]) as (b,):
            last = wide(starts[tirx.min(b + wide(1), wide(given) - 1)])
            end = tirx.Select(b + wide(1) < wide(given), last, wide(many))
            low, high = tirx.max(wide(starts[b]), wide(0)), tirx.min(end, wide(many))
            with T.serial(low, high) as i:
                owner[i] = b

    numbers = [product(shape(indices)), shape(offsets)[0]]
    return opaque("bag_of_index", body, [offsets], lambda n: [(n[0], "int64")], numbers)


def _table_gradient(
    grad: Any,
    indices: Any,
    owner: Any,
    bag_size: Any,
    maxima: Any,
    rows: Any,
    by_frequency: bool,
    mode: int,
    scale: Any,
    padding: int,
) -> Any:
    kind = dtype(grad)
    bag_count, width = shape(grad)
    count = product(shape(indices))

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        many, inner, entries, number = numbers
        grads, index, bag_of, sizes, best = ins[:5]
        out = outs[0]
        fill(out, entries * inner, lambda _: tirx.const(0, kind))
        if mode == _MAX:
            with loops([number, inner]) as (b, d), T.If(wide(sizes[b]) > wide(0)), T.Then():
                at = wide(best[b * inner + d]) * inner + d
                out[at] = out[at] + grads[b * inner + d]
            return

        def used(i: Any) -> Any:
            row = wide(index[i])
            inside = tirx.And(row >= wide(0), row < wide(entries))
            return tirx.And(inside, tirx.NE(row, wide(padding)))

        if by_frequency:
            _frequencies(index, many, entries, outs[1], outs[2])
        with loops([many]) as (i,), T.If(used(i)), T.Then(), loops([inner]) as (d,):
            row, bag = wide(index[i]), bag_of[i]
            value = grads[wide(bag) * inner + d]
            if scale is not None:
                value = value * ins[5][i]
            if mode == _MEAN:
                value = value / tirx.Cast(kind, tirx.max(wide(sizes[wide(bag)]), wide(1)))
            if by_frequency:
                value = value / tirx.Cast(kind, outs[2][row])
            out[row * inner + d] = out[row * inner + d] + value

    def outputs(numbers: list[Any]) -> list[tuple[Any, str]]:
        _, inner, entries, _ = numbers
        counts = [(entries, "int64")] * 2
        return [(entries * inner, kind), *(counts if by_frequency else [])]

    # The maximum's gradient follows the rows of the maxima; frequencies do not change it.
    by_frequency = by_frequency and mode != _MAX
    inputs = [grad, indices, owner, bag_size, maxima, *([] if scale is None else [scale])]
    numbers = [count, width, rows, bag_count]
    result = opaque("embedding_bag_backward", body, inputs, outputs, numbers)
    if by_frequency:
        result = relax.TupleGetItem(result, 0)
    return reshape(result, [rows, width])


def _frequencies(index: Any, many: Any, entries: Any, counts: Any, divisors: Any) -> None:
    """How often each row occurs, and what eager divides its gradient by.

    That is not the row's own count: eager takes, for the k-th of the rows that occur, the count of
    the row that the k-th of the sorted indices names.
    """
    fill(counts, entries, lambda _: wide(0))
    with loops([many]) as (i,):
        row = wide(index[i])
        with T.If(tirx.And(row >= wide(0), row < wide(entries))), T.Then():
            counts[row] += wide(1)
    state = local("int64", 3)
    number, named, before = 0, 1, 2  # of rows seen; the row named; how many indices up to it
    state[number], state[named], state[before] = wide(0), wide(0), counts[wide(0)]
    with loops([entries]) as (row,):
        divisors[row] = wide(1)
        with T.If(counts[row] > wide(0)), T.Then():
            with T.While(state[before] <= state[number]):
                state[named] += wide(1)
                state[before] += counts[state[named]]
            divisors[row] = counts[state[named]]
            state[number] += wide(1)


@converts(aten._embedding_bag_backward.default)
def embedding_bag_backward(
    grad: Any,
    indices: Any,
    offsets: Any,
    offset2bag: Any,
    bag_size: Any,
    maximum_indices: Any,
    num_weights: Any,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Any,
    padding_idx: int = -1,
) -> Any:
    """Gradients of the rows added up; the padding row gets none."""
    if sparse:
        raise Unsupported("a sparse gradient")
    return _table_gradient(
        grad,
        indices,
        owners(indices, offsets),
        bag_size,
        maximum_indices,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )


@converts(aten._embedding_bag_dense_backward.default)
def embedding_bag_dense_backward(
    grad: Any,
    indices: Any,
    offset2bag: Any,
    bag_size: Any,
    maximum_indices: Any,
    num_weights: Any,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Any,
    padding_idx: int = -1,
) -> Any:
    """`embedding_bag_backward` with the bag of each index given."""
    return _table_gradient(
        grad,
        indices,
        offset2bag,
        bag_size,
        maximum_indices,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )


@converts(aten._embedding_bag_per_sample_weights_backward.default)
def embedding_bag_per_sample_weights_backward(
    grad: Any,
    weight: Any,
    indices: Any,
    offsets: Any,
    offset2bag: Any,
    mode: int,
    padding_idx: int = -1,
) -> Any:
    """For each sample the product of its row and its bag's gradient; 0 for padding."""
    kind = dtype(grad)
    wider = compute_dtype(kind)

    def kernel(g: Any, table: Any, index: Any, owner: Any) -> Any:
        d = te.reduce_axis((0, g.shape[1]), name="d")

        def element(i: Any) -> Any:
            row = tirx.max(tirx.min(wide(index(i)), table.shape[0] - 1), wide(0))
            a, b = tirx.Cast(wider, g(owner(i), d)), tirx.Cast(wider, table(row, d))
            used = tirx.NE(wide(index(i)), wide(padding_idx))
            return te.sum(tirx.Select(used, a * b, tirx.const(0, wider)), axis=[d])

        return te.compute(index.shape, element, name="sample_weight_gradient")

    owner = owners(indices, offsets)
    return cast(te_call(kernel, grad, weight, indices, owner), kind)
