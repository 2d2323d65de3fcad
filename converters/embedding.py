"""Rows of a table by index, and the gradient of the table."""

from __future__ import annotations

from typing import Any

import torch

from .common import compute_dtype, converts, dtype, product, relax, reshape, shape, tirx
from .indices import checked, offset, take_along
from .opaque import T, fill, is_large, local, loops, opaque, wide

aten = torch.ops.aten


@converts(aten.embedding.default)
def embedding(
    weight: Any,
    indices: Any,
    padding_idx: Any = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Rows of the table; a negative index, or one beyond its end, is an IndexError."""
    message = "index out of range in self"
    return take_along(
        weight, checked([indices], [shape(weight)[0]], wrap=False, message=message), 0
    )


@converts(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    grad_output: Any,
    indices: Any,
    num_weights: Any,
    padding_idx: Any,
    scale_grad_by_freq: bool,
) -> Any:
    """Gradients of the rows added up; the padding row gets none."""
    width = shape(grad_output)[-1]
    count = product(shape(indices))
    kind = dtype(grad_output)
    # Each thread has columns of its own, so that no two add to one element.
    shares = 4 if isinstance(width, int) and width % 64 == 0 and is_large(width * count) else 1

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        many, inner, rows, padding = numbers
        grad, index, out = ins[0], ins[1], outs[0]
        fill(out, rows * inner, lambda _: tirx.const(0, kind))

        def counted(m: Any) -> Any:
            row = wide(index[m])
            inside = tirx.And(row >= wide(0), row < wide(rows))
            return tirx.And(inside, tirx.NE(row, wide(padding)))

        if scale_grad_by_freq:
            fill(outs[1], rows, lambda _: wide(0))
            with loops([many]) as (m,), T.If(counted(m)), T.Then():
                outs[1][wide(index[m])] += wide(1)
        part = inner // shares if shares > 1 else inner
        parallel = 0 if shares > 1 else None
        with (
            loops([shares, many], parallel) as (share, m),
            T.If(counted(m)),
            T.Then(),
            loops([part]) as (s,),
        ):
            row, at = wide(index[m]), share * part + s
            value = grad[offset([m, at], [inner, 1])]
            if scale_grad_by_freq:
                value = value / tirx.Cast(kind, outs[1][row])
            out[offset([row, at], [inner, 1])] += value

    def outputs(numbers: list[Any]) -> list[tuple[Any, str]]:
        sizes = [(numbers[2] * numbers[1], kind), (numbers[2], "int64")]
        return sizes[: 1 + scale_grad_by_freq]

    numbers = [count, width, num_weights, padding_idx]
    result = opaque("embedding_backward", body, [grad_output, indices], outputs, numbers)
    if scale_grad_by_freq:
        result = relax.TupleGetItem(result, 0)
    return reshape(result, [num_weights, width])


@converts(aten.embedding_renorm.default)
def embedding_renorm(self: Any, indices: Any, max_norm: float, norm_type: float) -> Any:
    """The table with each indexed row that is longer than `max_norm` shortened to that."""
    kind = dtype(self)
    wider = compute_dtype(kind)
    rows, width = shape(self)
    message = "index out of range in self"
    index = checked([indices], [rows], wrap=False, message=message)

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        many, entries, inner = numbers
        table, row_at, out, named = ins[0], ins[1], outs[0], outs[1]
        total = local(wider)
        power = tirx.const(norm_type, wider)
        fill(named, entries, lambda _: wide(0))
        with loops([many]) as (m,):
            named[row_at[m]] = wide(1)
        with loops([entries], parallel=0 if is_large(entries * inner) else None) as (row,):
            total[0] = tirx.const(0, wider)
            with loops([inner]) as (d,):
                size = tirx.abs(tirx.Cast(wider, table[row * inner + d]))
                if norm_type == float("inf"):
                    total[0] = tirx.max(total[0], size)
                elif norm_type in (1.0, 2.0):
                    total[0] = total[0] + (size if norm_type == 1.0 else size * size)
                else:
                    total[0] = total[0] + tirx.pow(size, power)
            if norm_type == 2.0:
                total[0] = tirx.sqrt(total[0])
            elif norm_type not in (1.0, float("inf")):
                total[0] = tirx.pow(total[0], tirx.const(1, wider) / power)
            longest = tirx.const(max_norm, wider)
            shrunk = tirx.And(named[row].equal(wide(1)), total[0] > longest)
            share = longest / (total[0] + tirx.const(1e-7, wider))
            with loops([inner]) as (d,):
                value = tirx.Cast(wider, table[row * inner + d])
                value = tirx.Select(shrunk, value * share, value)
                out[row * inner + d] = tirx.Cast(kind, value)

    def outputs(numbers: list[Any]) -> list[tuple[Any, str]]:
        return [(numbers[1] * numbers[2], kind), (numbers[1], "int64")]

    numbers = [product(shape(indices)), rows, width]
    found = opaque("embedding_renorm", body, [self, index], outputs, numbers)
    return reshape(relax.TupleGetItem(found, 0), [rows, width])
