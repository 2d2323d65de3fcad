"""Distances between rows: `cdist`, `pdist` and their backward passes."""

from __future__ import annotations

import math
from typing import Any

import torch

from .common import (
    cast,
    converts,
    dtype,
    emit,
    op,
    product,
    reshape,
    shape,
    shape_expr,
    te,
    te_call,
    tirx,
    topi,
)
from .extremes import te_reducer
from .opaque import T, is_large, loops, opaque, wide
from .reductions import full

aten = torch.ops.aten


def _power(base: Any, exponent: float, kind: str) -> Any:
    # `tirx.power` warns of a base below zero, which a distance is not.
    return tirx.call_intrin(kind, "tirx.pow", base, tirx.const(exponent, kind))


def _te_distance(a: Any, b: Any, p: float) -> Any:
    """a: (batch, P, M), b: (batch, R, M) -> (batch, P, R)."""
    kind = str(a.dtype)
    k = te.reduce_axis((0, a.shape[2]), name="k")
    zero, one = tirx.const(0, kind), tirx.const(1, kind)

    def difference(n: Any, i: Any, j: Any) -> Any:
        return a[n, i, k] - b[n, j, k]

    def element(n: Any, i: Any, j: Any) -> Any:
        d = difference(n, i, j)
        if p == 0:
            count = tirx.Select(d == zero, zero, one)
            return te.sum(tirx.Select(tirx.isnan(d), d, count), axis=k)
        if p == 1:
            return te.sum(tirx.abs(d), axis=k)
        if p == 2:
            return te.sum(d * d, axis=k)
        if math.isinf(p):
            return te_reducer(kind)(tirx.abs(d), axis=k)
        return te.sum(_power(tirx.abs(d), p, kind), axis=k)

    total = te.compute((a.shape[0], a.shape[1], b.shape[1]), element, name="distance")
    if p == 2:
        return topi.sqrt(total)
    if p in (0, 1) or math.isinf(p):
        return total
    return te.compute(total.shape, lambda *i: _power(total(*i), 1 / p, kind), name="root")


def _te_gradient(grad: Any, a: Any, b: Any, distance: Any, p: float) -> Any:
    """Gradient of `a`: over all j the share of (i, j); a distance of zero has none."""
    kind = str(a.dtype)
    j = te.reduce_axis((0, b.shape[1]), name="j")
    zero = tirx.const(0, kind)

    def element(n: Any, i: Any, m: Any) -> Any:
        d, g, whole = a[n, i, m] - b[n, j, m], grad[n, i, j], distance[n, i, j]
        size = tirx.abs(d)
        sign = tirx.Select(
            d > zero, tirx.const(1, kind), tirx.Select(d < zero, tirx.const(-1, kind), zero)
        )
        if p == 1:
            share = g * sign
        elif math.isinf(p):
            share = tirx.Select(size.equal(whole), g * sign, zero)
        elif p == 2:
            share = tirx.Select(whole.equal(zero), zero, g * d / whole)
        else:
            power = _power(size, p - 1, kind)
            ratio = sign * power * g / _power(whole, p - 1, kind)
            none = tirx.any(whole.equal(zero), d.equal(zero)) if p < 2 else whole.equal(zero)
            share = tirx.Select(none, zero, ratio)
        return te.sum(share, axis=j)

    return te.compute(a.shape, element, name="distance_gradient")


def _batched(x: Any, batch: list[Any]) -> Any:
    """(..., rows, features) broadcast over the batch and flattened to three axes."""
    rows = shape(x)[-2:]
    if [*batch, *rows] != shape(x):
        x = op.broadcast_to(x, shape_expr([*batch, *rows]))
    return reshape(x, [product(batch), *rows])


def _batch_of(x1: Any, x2: Any) -> list[Any]:
    first, second = shape(x1)[:-2], shape(x2)[:-2]
    rank = max(len(first), len(second))
    first, second = ([1] * (rank - len(s)) + s for s in (first, second))
    return [b if isinstance(a, int) and a == 1 else a for a, b in zip(first, second, strict=True)]


@converts(aten._cdist_forward.default)
def cdist(x1: Any, x2: Any, p: float, compute_mode: int | None) -> Any:
    """The p-norm of every difference of two rows; p may be 0 and infinity."""
    batch = _batch_of(x1, x2)
    sizes = [*batch, shape(x1)[-2], shape(x2)[-2]]
    if any(s == 0 for s in [*sizes, shape(x1)[-1]]):
        return full(sizes, 0, dtype(x1))
    a, b = _batched(x1, batch), _batched(x2, batch)
    found = te_call(lambda s, t: _te_distance(s, t, p), a, b, primfunc_name_hint="cdist")
    return reshape(found, sizes)


@converts(aten._cdist_backward.default)
def cdist_backward(grad: Any, x1: Any, x2: Any, p: float, cdist: Any) -> Any:
    """Gradient of the first operand."""
    batch = _batch_of(x1, x2)
    sizes = [*batch, *shape(x1)[-2:]]
    if p == 0:
        return full(sizes, 0, dtype(x1))
    if any(s == 0 for s in [*sizes, shape(x2)[-2]]):
        return full(shape(x1), 0, dtype(x1))  # eager does not broadcast these
    operands = [_batched(v, batch) for v in (grad, x1, x2, cdist)]
    found = te_call(
        lambda g, a, b, d: _te_gradient(g, a, b, d, p),
        *operands,
        primfunc_name_hint="cdist_backward",
    )
    return reshape(found, sizes)


def _place(row: Any, other: Any, rows: Any) -> Any:
    """Where the pair of a row and a later one stands among all pairs."""
    return row * rows - row * (row + 1) // 2 + other - row - 1


@converts(aten._pdist_forward.default)
def pdist(self: Any, p: float = 2.0) -> Any:
    """The distances of the pairs of rows (i, j), i < j."""
    rows, kind = shape(self)[0], dtype(self)
    if isinstance(rows, int) and rows < 2:
        return full([0], 0, kind)
    count = rows * (rows - 1) // 2

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        n = wide(numbers[0])
        with loops([n], parallel=0 if is_large(count) else None) as (i,), T.serial(i + 1, n) as j:
            outs[0][_place(i, j, n)] = ins[0][i * n + j]

    whole = cdist(self, self, p, None)
    found = opaque("pdist", body, [whole], lambda n: [(n[0] * (n[0] - 1) // 2, kind)], [rows])
    return reshape(found, [count])


@converts(aten._pdist_backward.default)
def pdist_backward(grad: Any, self: Any, p: float, pdist: Any) -> Any:
    """Gradient of the rows."""
    rows = shape(self)[0]
    if p == 0 or (isinstance(rows, int) and rows < 2):
        return full(shape(self), 0, dtype(self))

    def square(values: Any) -> Any:
        """The pairs as a symmetric matrix, with zeros for pairs of one row."""

        def element(pairs: Any, i: Any, j: Any) -> Any:
            low, high = tirx.min(i, j), tirx.max(i, j)
            pair = pairs(_place(low, high, wide(rows)))
            return tirx.if_then_else(i.equal(j), tirx.const(0, pairs.dtype), pair)

        def kernel(pairs: Any) -> Any:
            sizes = (wide(rows), wide(rows))
            return te.compute(sizes, lambda i, j: element(pairs, i, j), name="pairs")

        return emit(te_call(kernel, values, primfunc_name_hint="pairs"))

    return cdist_backward(square(grad), self, self, p, square(cast(pdist, dtype(self))))
