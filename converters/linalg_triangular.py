"""Equations with triangular matrices."""

from __future__ import annotations

from typing import Any

import torch

from .common import converts, emit, ndim, op
from .linalg_kernel import Matrix, matrix_kernel, real, together
from .opaque import local, loops, wide

aten = torch.ops.aten


def substitute(a: Matrix, x: Matrix, lower: bool, unit: bool) -> None:
    """``x = inverse(a) @ x`` in place, of one triangle of `a`; `unit`: its diagonal counts as 1."""
    size = wide(a.rows)
    factor = local(x.kind)

    def row(step: Any) -> Any:
        return step if lower else size - 1 - step

    with loops([a.rows]) as (step,):
        with loops([step]) as (before,):
            factor[0] = -a[row(step), row(before)]
            x.add_row(row(step), factor[0], x, row(before))
        if not unit:
            factor[0] = a[row(step), row(step)]
            with x.along_row(x.columns) as j:
                x[row(step), j] = x[row(step), j] / factor[0]


@converts(aten.linalg_solve_triangular.default)
def linalg_solve_triangular(
    self: Any, B: Any, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    """The solution of ``self @ X = B``, or of ``X @ self = B``; the other triangle is not read."""
    kind = real(self, B)
    (a, b), batch = together(self, B)

    def body(index: Any, ins: Any, outs: Any) -> None:
        coefficients, right = (Matrix(x, index) for x in ins)
        x = Matrix(outs[0], index)
        x.copy(right)
        if left:
            substitute(coefficients, x, not upper, unitriangular)
        else:
            substitute(coefficients.mT, x.mT, upper, unitriangular)

    return matrix_kernel(
        "solve_triangular",
        body,
        [a, b],
        lambda _, sizes: [(sizes, kind)],
        aten.linalg_solve_triangular.default,
        batch=batch,
        upper=upper,
        left=left,
        unitriangular=unitriangular,
    )[0]


@converts(aten.triangular_solve.default)
def triangular_solve(
    self: Any, A: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Any:
    """The solution of ``A @ X = self``, and the coefficients once more."""
    (a, b), _ = together(A, self)
    factor, high = (transposed(a), not upper) if transpose else (a, upper)
    x = linalg_solve_triangular(factor, b, upper=high, unitriangular=unitriangular)
    return x, a


def transposed(x: Any) -> Any:
    """Each matrix of a batch transposed."""
    rank = ndim(x)
    return emit(op.permute_dims(x, [*range(rank - 2), rank - 1, rank - 2]))
