"""Eigenvalues of symmetric matrices by cyclic Jacobi rotations."""

from __future__ import annotations

from typing import Any

import torch

from .common import Unsupported, converts, dtype, tirx
from .linalg_kernel import Matrix, lead, matrix_kernel, number, real, scratch
from .opaque import T, local, loops, require, wide
from .reductions import full

aten = torch.ops.aten

# Quadratic convergence needs some ten sweeps; NaN never converges.
SWEEPS = 40
_FAILED = (
    "linalg.eigh: The algorithm failed to converge because the input matrix is ill-conditioned or "
    "has too many repeated eigenvalues."
)
EPSILON = {"float32": 2.0**-23, "float64": 2.0**-52}


def rotate_rows(m: Matrix, p: Any, q: Any, c: Any, s: Any, work: Matrix) -> None:
    """Rows p and q become ``c p - s q`` and ``s p + c q``."""
    with m.along_row(m.columns) as k:
        work[0, k] = c * m[p, k] - s * m[q, k]
    with m.along_row(m.columns) as k:
        m[q, k] = s * m[p, k] + c * m[q, k]
    with m.along_row(m.columns) as k:
        m[p, k] = work[0, k]


def double(value: Any) -> Any:
    """A TIR number in float64."""
    return tirx.Cast("float64", value)


def tangent(zeta: Any) -> Any:
    """The smaller root of ``t**2 + 2 zeta t - 1``, for zeta in float64."""
    one = number(1.0, "float64")
    size = one / (tirx.abs(zeta) + tirx.sqrt(one + zeta * zeta))
    return tirx.Select(zeta < number(0.0, "float64"), -size, size)


def ranked(values: Any, order: Any, count: Any, descending: bool) -> None:
    """Let `order` hold the places of some values from the first to the last; equals in order."""
    best, held = local("int64"), local("int64")
    with loops([count]) as (i,):
        order[0, i] = i
    with loops([count]) as (i,):
        best[0] = i
        with loops([wide(count) - i - 1]) as (j,):
            ours, theirs = values[0, order[0, i + 1 + j]], values[0, order[0, best[0]]]
            ahead = ours > theirs if descending else ours < theirs
            with T.If(ahead), T.Then():
                best[0] = i + 1 + j
        held[0] = order[0, best[0]]
        order[0, best[0]] = order[0, i]
        order[0, i] = held[0]


def _diagonalise(s: Matrix, v: Matrix | None) -> None:
    """Let `s` become diagonal, and the rows of `v` its eigenvectors."""
    kind, size = s.kind, wide(s.rows)
    work = scratch(1, s.rows, kind)
    turned, sweep, limit = local("int64"), local("int64"), local("float64")
    numbers = local("float64", 3)
    limit[0] = number(0.0, "float64")
    with loops([size, size]) as (i, j):
        limit[0] = limit[0] + double(s[i, j]) * double(s[i, j])
    limit[0] = tirx.sqrt(limit[0]) * number(EPSILON[kind] / 16, "float64")
    turned[0], sweep[0] = wide(1), wide(0)
    with T.While(tirx.all(turned[0] > wide(0), sweep[0] < wide(SWEEPS))):
        turned[0] = wide(0)
        sweep[0] = sweep[0] + 1
        with loops([size]) as (p,), loops([size - p - 1]) as (offset,):
            q = p + 1 + offset
            with T.If(double(tirx.abs(s[p, q])) > limit[0]), T.Then():
                turned[0] = wide(1)
                two = number(2.0, "float64")
                numbers[0] = tangent((double(s[q, q]) - double(s[p, p])) / (two * double(s[p, q])))
                numbers[1] = number(1.0, "float64") / tirx.sqrt(
                    number(1.0, "float64") + numbers[0] * numbers[0]
                )
                c = tirx.Cast(kind, numbers[1])
                sine = tirx.Cast(kind, numbers[0] * numbers[1])
                rotate_rows(s, p, q, c, sine, work)
                rotate_rows(s.mT, p, q, c, sine, work)
                s[p, q] = number(0, kind)
                s[q, p] = number(0, kind)
                if v is not None:
                    rotate_rows(v, p, q, c, sine, work)


@converts(aten._linalg_eigh.default)
def linalg_eigh(A: Any, UPLO: str = "L", compute_v: bool = True) -> Any:
    """Eigenvalues from the smallest to the largest, and vectors of length 1 as columns."""
    kind = real(A)
    if UPLO.upper() not in ("L", "U"):
        raise Unsupported(f"UPLO={UPLO!r}")
    lower = UPLO.upper() == "L"

    def before(ins: Any) -> None:
        many, size, _ = ins[0].shape
        with loops([many, size, size]) as (index, i, j):
            a = Matrix(ins[0], index) if lower else Matrix(ins[0], index).mT
            finite = tirx.abs(a[i, j]) <= tirx.max_value(kind)
            # LAPACK has a formula of its own for two by two, which gives NaN.
            require(tirx.Or(finite, tirx.Or(i < j, wide(size) < wide(3))), _FAILED, "LinAlgError")

    def body(index: Any, ins: Any, outs: Any) -> None:
        a = Matrix(ins[0], index)
        a = a if lower else a.mT
        s = scratch(a.rows, a.rows, kind)
        values, order = scratch(1, a.rows, kind), scratch(1, a.rows, "int64")
        s.fill(lambda i, j: tirx.if_then_else(i >= j, a[i, j], a[j, i]))
        v = None
        if compute_v:
            v = scratch(a.rows, a.rows, kind)
            v.fill(lambda i, j: tirx.Select(i.equal(j), number(1, kind), number(0, kind)))
        _diagonalise(s, v)
        with loops([a.rows]) as (i,):
            values[0, i] = s[i, i]
        ranked(values, order, a.rows, descending=False)
        with loops([a.rows]) as (i,):
            outs[0][index, i] = values[0, order[0, i]]
        if v is not None:
            rows = v
            Matrix(outs[1], index).fill(lambda i, j: rows[order[0, j], i])

    found = matrix_kernel(
        "eigh",
        body,
        [A],
        lambda s: [([s[0]], kind), (s, kind)][: 1 + compute_v],
        aten._linalg_eigh.default,
        batch=lead(A),
        before=before,
        UPLO=UPLO,
        compute_v=compute_v,
    )
    return tuple(found) if compute_v else (found[0], full([0], 0, dtype(A)))
