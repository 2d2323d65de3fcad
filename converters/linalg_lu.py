"""The LU factorisation with partial pivoting and what is computed from it."""

from __future__ import annotations

from typing import Any

import torch

from .common import Unsupported, converts, dtype, emit, shape, te, te_call, tirx
from .linalg_errors import checked
from .linalg_kernel import (
    Matrix,
    expanded,
    identity,
    lead,
    matrix_kernel,
    number,
    real,
    scratch,
    smaller,
    together,
)
from .linalg_triangular import substitute, transposed
from .opaque import T, local, loops, wide
from .reductions import full

aten = torch.ops.aten


def _factor(a: Matrix, pivots: Any, info: Any, index: Any) -> None:
    """Let `a` become L below its diagonal and U; row k has changed places with row pivots[k].

    Rows count from 1, as in LAPACK. A column without a pivot is left, and the first one noted.
    """
    best, size, factor = local("int64"), local(a.kind), local(a.kind)
    info[index] = tirx.const(0, "int32")
    with loops([smaller(a.rows, a.columns)]) as (k,):
        best[0] = k
        size[0] = tirx.abs(a[k, k])
        below = wide(a.rows) - k - 1
        with loops([below]) as (i,), T.If(tirx.abs(a[k + 1 + i, k]) > size[0]), T.Then():
            best[0] = k + 1 + i
            size[0] = tirx.abs(a[k + 1 + i, k])
        pivots[index, k] = tirx.Cast("int32", best[0] + 1)
        with T.If(size[0].equal(number(0, a.kind))):
            with T.Then(), T.If(info[index].equal(tirx.const(0, "int32"))), T.Then():
                info[index] = tirx.Cast("int32", k + 1)
            with T.Else():
                with T.If(best[0] != k), T.Then():
                    a.swap_rows(k, best[0])
                with loops([below]) as (i,):
                    factor[0] = a[k + 1 + i, k] / a[k, k]
                    a[k + 1 + i, k] = factor[0]
                    factor[0] = -factor[0]
                    a.add_row(k + 1 + i, factor[0], a, k, start=k + 1)


@converts(aten.linalg_lu_factor_ex.default)
def linalg_lu_factor_ex(A: Any, *, pivot: bool = True, check_errors: bool = False) -> Any:
    """L and U in one matrix, the pivots, and 0 or the first column without one."""
    kind = real(A)
    if not pivot:
        raise Unsupported("LU without pivoting")

    def body(index: Any, ins: Any, outs: Any) -> None:
        a, lu = Matrix(ins[0], index), Matrix(outs[0], index)
        lu.copy(a)
        _factor(lu, outs[1], outs[2], index)

    lu, pivots, info = matrix_kernel(
        "lu_factor",
        body,
        [A],
        lambda s: [(s, kind), ([smaller(*s)], "int32"), ((), "int32")],
        aten.linalg_lu_factor_ex.default,
        batch=lead(A),
    )
    return (checked(lu, info, "torch.linalg.lu_factor_ex") if check_errors else lu), pivots, info


@converts(aten.linalg_lu.default)
def linalg_lu(A: Any, *, pivot: bool = True) -> Any:
    """The factors P, L and U."""
    lu, pivots, _ = linalg_lu_factor_ex(A, pivot=pivot)
    return lu_unpack(lu, pivots)


@converts(aten.lu_unpack.default)
def lu_unpack(
    LU_data: Any, LU_pivots: Any, unpack_data: bool = True, unpack_pivots: bool = True
) -> Any:
    """P, L and U; what is not wanted is a tensor of no elements."""
    kind = dtype(LU_data)
    permutation = lower = upper = full([0], 0, kind)
    if unpack_pivots:
        permutation = _permutation(LU_data, LU_pivots)
    if unpack_data:
        *batch, rows, columns = shape(LU_data)
        least = smaller(rows, columns)
        lower = te_call(_te_lower, LU_data, [*batch, rows, least])
        upper = te_call(_te_upper, LU_data, [*batch, least, columns])
    return permutation, lower, upper


def _te_lower(lu: Any, sizes: Any) -> Any:
    def element(*at: Any) -> Any:
        one, zero = (number(v, lu.dtype) for v in (1, 0))
        outside = tirx.Select(at[-2].equal(at[-1]), one, zero)
        return tirx.if_then_else(at[-2] > at[-1], lu(*at), outside)

    return te.compute(sizes, element, name="lower")


def _te_upper(lu: Any, sizes: Any) -> Any:
    def element(*at: Any) -> Any:
        return tirx.if_then_else(at[-2] <= at[-1], lu(*at), number(0, lu.dtype))

    return te.compute(sizes, element, name="upper")


def _permutation(lu: Any, pivots: Any) -> Any:
    """The matrix that undoes the exchanges of rows."""
    kind, rows = dtype(lu), shape(lu)[-2]
    batch = lead(lu)
    if any(isinstance(s, int) and s == 0 for s in shape(pivots)):
        return identity(batch, rows, kind)

    def body(index: Any, ins: Any, outs: Any) -> None:
        given, p = ins[0], Matrix(outs[0], index)
        order = scratch(1, p.rows, "int64")
        with loops([p.rows]) as (i,):
            order[0, i] = i
        with loops([given.shape[1]]) as (i,):
            order.mT.swap_rows(i, row_of(given[index, i], p.rows))
        p.fill(lambda i, j: number(0, kind))
        with loops([p.rows]) as (i,):
            p[order[0, i], i] = number(1, kind)

    pivots = expanded(pivots, batch, core=1)
    sizes = lambda _: [([rows, rows], kind)]  # noqa: E731
    return matrix_kernel("permutation", body, [pivots], sizes, batch=batch)[0]


def row_of(pivot: Any, rows: Any) -> Any:
    """The row that a pivot names, counted from 0; kept inside of the matrix."""
    last = wide(rows) - wide(1)
    return tirx.max(tirx.min(wide(pivot) - wide(1), last), wide(0))


@converts(aten.linalg_lu_solve.default)
def linalg_lu_solve(
    LU: Any, pivots: Any, B: Any, *, left: bool = True, adjoint: bool = False
) -> Any:
    """The solution of ``A @ X = B`` or ``X @ A = B`` from A's factors; `adjoint` transposes A."""
    kind = real(LU, B)
    if not left:
        x = linalg_lu_solve(LU, pivots, transposed(B), adjoint=not adjoint)
        return transposed(x)
    (lu, b), batch = together(LU, B)
    pivots = expanded(pivots, batch, core=1)

    def body(index: Any, ins: Any, outs: Any) -> None:
        factors, right, x = Matrix(ins[0], index), Matrix(ins[2], index), Matrix(outs[0], index)
        size = wide(factors.rows)
        x.copy(right)
        if adjoint:
            substitute(factors.mT, x, lower=True, unit=False)
            substitute(factors.mT, x, lower=False, unit=True)
        with loops([size]) as (step,):
            i = size - 1 - step if adjoint else step
            x.swap_rows(i, row_of(ins[1][index, i], size))
        if not adjoint:
            substitute(factors, x, lower=True, unit=True)
            substitute(factors, x, lower=False, unit=False)

    return matrix_kernel(
        "lu_solve",
        body,
        [lu, emit(pivots), b],
        lambda _, __, sizes: [(sizes, kind)],
        aten.linalg_lu_solve.default,
        batch=batch,
        adjoint=adjoint,
    )[0]
