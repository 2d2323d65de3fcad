"""The QR factorisation by Householder reflections, signs and storage as in LAPACK."""

from __future__ import annotations

from typing import Any

import torch

from .common import converts, dtype, op, shape, shape_expr, te, te_call, tirx
from .linalg_kernel import Matrix, lead, matrix_kernel, number, real, scratch, smaller
from .opaque import T, local, loops, wide
from .reductions import full

aten = torch.ops.aten


def _reflect(c: Matrix, v: Matrix, k: Any, tau: Any, work: Matrix, start: Any = 0) -> None:
    """``c -= tau * v v.T c`` for the vector v of 1 at row k and `v`'s column k below it."""
    below, factor = wide(c.rows) - k - 1, local(c.kind)
    with c.along_row(wide(c.columns) - wide(start)) as j:
        work[0, wide(start) + j] = c[k, wide(start) + j]
    with loops([below]) as (i,):
        factor[0] = v[k + 1 + i, k]
        work.add_row(0, factor[0], c, k + 1 + i, start)
    factor[0] = -tau
    c.add_row(k, factor[0], work, 0, start)
    with loops([below]) as (i,):
        factor[0] = -tau * v[k + 1 + i, k]
        c.add_row(k + 1 + i, factor[0], work, 0, start)


def _factor(a: Matrix, tau: Any, index: Any) -> None:
    """Let `a` become R and, below its diagonal, the vectors of the reflections."""
    kind = a.kind
    work = scratch(1, a.columns, kind)
    below, alpha, beta, total = (local(k) for k in ("int64", kind, kind, "float64"))
    with loops([smaller(a.rows, a.columns)]) as (k,):
        below[0] = wide(a.rows) - k - 1
        total[0] = number(0.0, "float64")
        with loops([below[0]]) as (i,):
            value = tirx.Cast("float64", a[k + 1 + i, k])
            total[0] = total[0] + value * value
        tau[index, k] = number(0, kind)
        with T.If(total[0] > number(0.0, "float64")), T.Then():
            alpha[0] = a[k, k]
            square = tirx.Cast("float64", alpha[0]) * tirx.Cast("float64", alpha[0])
            beta[0] = tirx.Cast(kind, tirx.sqrt(square + total[0]))
            beta[0] = tirx.Select(alpha[0] < number(0, kind), beta[0], -beta[0])
            tau[index, k] = (beta[0] - alpha[0]) / beta[0]
            with loops([below[0]]) as (i,):
                a[k + 1 + i, k] = a[k + 1 + i, k] / (alpha[0] - beta[0])
            _reflect(a, a, k, tau[index, k], work, start=k + 1)
            a[k, k] = beta[0]


@converts(aten.geqrf.default)
def geqrf(self: Any) -> Any:
    """R with the reflections below it, and their factors."""
    kind = real(self)

    def body(index: Any, ins: Any, outs: Any) -> None:
        a = Matrix(outs[0], index)
        a.copy(Matrix(ins[0], index))
        _factor(a, outs[1], index)

    return tuple(
        matrix_kernel(
            "geqrf",
            body,
            [self],
            lambda sizes: [(sizes, kind), ([smaller(*sizes)], kind)],
            aten.geqrf.default,
            batch=lead(self),
        )
    )


@converts(aten.linalg_qr.default)
def linalg_qr(A: Any, mode: str = "reduced") -> Any:
    """Q and R; all of Q's columns when complete, no Q at all in mode "r"."""
    real(A)
    a, tau = geqrf(A)
    *batch, rows, columns = shape(A)
    width = rows if mode == "complete" else smaller(rows, columns)
    r = te_call(_te_upper, a, [*batch, width, columns], primfunc_name_hint="upper")
    if mode == "r":
        return full([0], 0, dtype(A)), r
    if any(isinstance(s, int) and s == 0 for s in shape(A)):
        eye = op.eye(rows, width, dtype=dtype(A))
        return op.broadcast_to(eye, shape_expr([*batch, rows, width])), r
    padded = te_call(_te_padded, a, [*batch, rows, width], primfunc_name_hint="reflections")
    return linalg_householder_product(padded, tau), r


def _te_upper(a: Any, sizes: Any) -> Any:
    def element(*at: Any) -> Any:
        return tirx.if_then_else(at[-2] <= at[-1], a(*at), number(0, a.dtype))

    return te.compute(sizes, element, name="upper")


def _te_padded(a: Any, sizes: Any) -> Any:
    def element(*at: Any) -> Any:
        return tirx.if_then_else(at[-1] < a.shape[-1], a(*at), number(0, a.dtype))

    return te.compute(sizes, element, name="reflections")


@converts(aten.linalg_householder_product.default)
def linalg_householder_product(input: Any, tau: Any) -> Any:
    """The first columns of the product of reflections."""
    kind = real(input, tau)
    if any(isinstance(s, int) and s == 0 for s in shape(tau)):
        return op.broadcast_to(op.eye(*shape(input)[-2:], dtype=kind), shape_expr(shape(input)))

    def body(index: Any, ins: Any, outs: Any) -> None:
        vectors, q = Matrix(ins[0], index), Matrix(outs[0], index)
        work, count = scratch(1, q.columns, kind), wide(ins[1].shape[1])
        q.fill(lambda i, j: tirx.Select(i.equal(j), number(1, kind), number(0, kind)))
        with loops([count]) as (step,):
            k = count - 1 - step
            _reflect(q, vectors, k, ins[1][index, k], work)

    return matrix_kernel(
        "householder_product",
        body,
        [input, tau],
        lambda sizes, _: [(sizes, kind)],
        aten.linalg_householder_product.default,
        batch=lead(input),
    )[0]


@converts(aten.ormqr.default)
def ormqr(self: Any, input2: Any, input3: Any, left: bool = True, transpose: bool = False) -> Any:
    """The whole product of reflections, or its transpose, times a matrix, or the other way."""
    kind = real(self, input2, input3)
    if any(isinstance(s, int) and s == 0 for s in shape(input2)):
        return input3

    def body(index: Any, ins: Any, outs: Any) -> None:
        vectors, result = Matrix(ins[0], index), Matrix(outs[0], index)
        result.copy(Matrix(ins[2], index))
        c = result if left else result.mT
        work, count = scratch(1, c.columns, kind), wide(ins[1].shape[1])
        with loops([count]) as (step,):
            k = step if transpose == left else count - 1 - step
            _reflect(c, vectors, k, ins[1][index, k], work)

    return matrix_kernel(
        "ormqr",
        body,
        [self, input2, input3],
        lambda _, __, sizes: [(sizes, kind)],
        aten.ormqr.default,
        batch=lead(input3),
        left=left,
        transpose=transpose,
    )[0]
