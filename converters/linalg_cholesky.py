"""The Cholesky factorisation and what is computed from it."""

from __future__ import annotations

from typing import Any

import torch

from .common import converts, tirx
from .linalg_errors import checked
from .linalg_kernel import Matrix, lead, matrix_kernel, number, real, scratch, together
from .linalg_triangular import substitute
from .opaque import T, local, loops, wide

aten = torch.ops.aten


def _factor(u: Matrix, info: Any, index: Any) -> None:
    """Let the upper triangle of `u` become the U of ``U.T @ U``, row by row.

    What is not positive-definite ends it: `info` is then the row, counted from 1.
    """
    size, row, value = wide(u.rows), local("int64"), local(u.kind)
    row[0] = wide(0)
    info[index] = tirx.const(0, "int32")
    with T.While(row[0] < size):
        k = row[0]
        value[0] = u[k, k]
        with T.If(value[0] > number(0, u.kind)):
            with T.Then():
                value[0] = tirx.sqrt(value[0])
                u[k, k] = value[0]
                with u.along_row(size - k - 1) as j:
                    u[k, k + 1 + j] = u[k, k + 1 + j] / value[0]
                with loops([size - k - 1]) as (i,):
                    value[0] = -u[k, k + 1 + i]
                    u.add_row(k + 1 + i, value[0], u, k, start=k + 1 + i)
                row[0] = k + 1
            with T.Else():
                info[index] = tirx.Cast("int32", k + 1)
                row[0] = size


@converts(aten.linalg_cholesky_ex.default)
def linalg_cholesky_ex(self: Any, *, upper: bool = False, check_errors: bool = False) -> Any:
    """The factor, and 0 or the order of the leading minor that is not positive-definite."""
    kind = real(self)
    zero = number(0, kind)

    def body(index: Any, ins: Any, outs: Any) -> None:
        a, result = Matrix(ins[0], index), Matrix(outs[0], index)
        u = scratch(a.rows, a.rows, kind)
        u.copy(a if upper else a.mT)
        _factor(u, outs[1], index)
        if upper:
            result.fill(lambda i, j: tirx.Select(i <= j, u[i, j], zero))
        else:
            result.fill(lambda i, j: tirx.Select(i >= j, u[j, i], zero))

    factor, info = matrix_kernel(
        "cholesky",
        body,
        [self],
        lambda sizes: [(sizes, kind), ((), "int32")],
        aten.linalg_cholesky_ex.default,
        batch=lead(self),
        upper=upper,
    )
    return (checked(factor, info, "linalg.cholesky_ex") if check_errors else factor), info


@converts(aten.cholesky.default)
def cholesky(self: Any, upper: bool = False) -> Any:
    """The factor; LinAlgError where there is none."""
    factor, info = linalg_cholesky_ex(self, upper=upper)
    return checked(factor, info, "cholesky")


@converts(aten.cholesky_solve.default)
def cholesky_solve(self: Any, input2: Any, upper: bool = False) -> Any:
    """The solution of ``A @ X = self``, from A's factor `input2`."""
    kind = real(self, input2)
    (b, factor), batch = together(self, input2)

    def body(index: Any, ins: Any, outs: Any) -> None:
        right, f, x = Matrix(ins[0], index), Matrix(ins[1], index), Matrix(outs[0], index)
        low = f.mT if upper else f
        x.copy(right)
        substitute(low, x, lower=True, unit=False)
        substitute(low.mT, x, lower=False, unit=False)

    return matrix_kernel(
        "cholesky_solve",
        body,
        [b, factor],
        lambda sizes, _: [(sizes, kind)],
        aten.cholesky_solve.default,
        batch=batch,
        upper=upper,
    )[0]


@converts(aten._cholesky_solve_helper.default)
def cholesky_solve_helper(self: Any, A: Any, upper: bool) -> Any:
    """The same for batches that agree."""
    return cholesky_solve(self, A, upper)


@converts(aten.cholesky_inverse.default)
def cholesky_inverse(self: Any, upper: bool = False) -> Any:
    """The inverse of A, from its factor."""
    kind = real(self)

    def body(index: Any, ins: Any, outs: Any) -> None:
        factor, x = Matrix(ins[0], index), Matrix(outs[0], index)
        low = factor.mT if upper else factor
        x.fill(lambda i, j: tirx.Select(i.equal(j), number(1, kind), number(0, kind)))
        substitute(low, x, lower=True, unit=False)
        substitute(low.mT, x, lower=False, unit=False)

    return matrix_kernel(
        "cholesky_inverse",
        body,
        [self],
        lambda sizes: [(sizes, kind)],
        aten.cholesky_inverse.default,
        batch=lead(self),
        upper=upper,
    )[0]
