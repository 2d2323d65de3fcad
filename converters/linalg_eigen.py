"""Eigenvalues of symmetric matrices, by way of three diagonals."""

from __future__ import annotations

from typing import Any

import torch

from .common import Unsupported, converts, dtype, tirx
from .linalg_kernel import Matrix, lead, matrix_kernel, number, real, scratch
from .opaque import T, local, loops, require, wide
from .reductions import full

aten = torch.ops.aten

# Two or three are the rule for each eigenvalue; NaN never converges.
_STEPS = 60
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


class _Tridiagonal:
    """A symmetric matrix, taken to three diagonals and then to one.

    Args:
        s: the matrix; its content is used up.
        v: an identity whose rows become the eigenvectors; None where they are not wanted.
    """

    def __init__(self, s: Matrix, v: Matrix | None) -> None:
        self.s, self.v, self.size = s, v, wide(s.rows)
        self.diagonal, self.beside = (scratch(1, s.rows, "float64") for _ in range(2))

    def reduce(self) -> None:
        """Householder reflections from both sides leave the diagonal and what is beside it."""
        s, kind, zero = self.s, self.s.kind, number(0.0, "float64")
        x, product, work = (scratch(1, s.rows, kind) for _ in range(3))
        total, factor = local("float64", 3), local(kind, 3)
        with loops([self.size]) as (k,):
            self.beside[0, k] = zero
            rest = self.size - k - 1
            total[0] = zero
            with loops([rest]) as (i,):
                x[0, k + 1 + i] = s[k, k + 1 + i]
                with T.If(i > wide(0)), T.Then():
                    total[0] = total[0] + double(s[k, k + 1 + i]) * double(s[k, k + 1 + i])
            with T.If(rest > wide(0)), T.Then():
                first = double(s[k, k + 1])
                self.beside[0, k] = first
                with T.If(total[0] > zero), T.Then():
                    total[1] = tirx.sqrt(first * first + total[0])
                    total[1] = tirx.Select(first < zero, total[1], -total[1])
                    self.beside[0, k] = total[1]
                    x[0, k + 1] = tirx.Cast(kind, first - total[1])
                    # What the vector's outer product is multiplied by.
                    total[2] = (first - total[1]) * (first - total[1]) + total[0]
                    factor[0] = tirx.Cast(kind, number(2.0, "float64") / total[2])
                    self.reflect(x, product, work, k + 1, factor)
        with loops([self.size]) as (k,):
            self.diagonal[0, k] = double(s[k, k])

    def reflect(self, x: Matrix, product: Matrix, work: Matrix, start: Any, factor: Any) -> None:
        """``s = h s h`` and ``v = h v`` for ``h = 1 - factor[0] x x.T``, from a row on."""
        s, kind, count = self.s, self.s.kind, self.size - start
        with loops([count]) as (i,):
            product[0, start + i] = number(0, kind)
        with loops([count]) as (i,):
            factor[1] = factor[0] * x[0, start + i]
            product.add_row(0, factor[1], s, start + i, start)
        factor[1] = number(0, kind)
        with loops([count]) as (i,):
            factor[1] = factor[1] + x[0, start + i] * product[0, start + i]
        factor[1] = -factor[0] * factor[1] * number(0.5, kind)
        product.add_row(0, factor[1], x, 0, start)
        with loops([count]) as (i,):
            factor[1] = -x[0, start + i]
            s.add_row(start + i, factor[1], product, 0, start)
            factor[1] = -product[0, start + i]
            s.add_row(start + i, factor[1], x, 0, start)
        if self.v is None:
            return
        with loops([self.size]) as (j,):
            work[0, j] = number(0, kind)
        with loops([count]) as (i,):
            factor[1] = factor[0] * x[0, start + i]
            work.add_row(0, factor[1], self.v, start + i)
        with loops([count]) as (i,):
            factor[1] = -x[0, start + i]
            self.v.add_row(start + i, factor[1], work, 0)

    def diagonalise(self) -> None:
        """The implicit QL method.

        Dubrulle, Martin and Wilkinson, Numer. Math. 12, 1968.
        """
        last, step = local("int64"), local("int64")
        with loops([self.size]) as (first,):
            step[0], last[0] = wide(0), first + 1
            with T.While(tirx.all(last[0] > first, step[0] < wide(_STEPS))):
                step[0] = step[0] + 1
                self.find_end(first, last)
                with T.If(last[0] > first), T.Then():
                    self.chase(first, last[0])

    def find_end(self, first: Any, last: Any) -> None:
        """The first row from `first` on that nothing but rounding ties to the next."""
        d, e = self.diagonal, self.beside
        found = local("int64")
        last[0], found[0] = first, wide(0)
        with T.While(tirx.all(last[0] < self.size - 1, found[0].equal(wide(0)))):
            size = tirx.abs(d[0, last[0]]) + tirx.abs(d[0, last[0] + 1])
            small = tirx.abs(e[0, last[0]]) <= number(EPSILON["float64"], "float64") * size
            with T.If(small):
                with T.Then():
                    found[0] = wide(1)
                with T.Else():
                    last[0] = last[0] + 1

    def chase(self, first: Any, last: Any) -> None:
        """One step of the method with the shift that Wilkinson gave it."""
        d, e, one = self.diagonal, self.beside, number(1.0, "float64")
        zero, two = number(0.0, "float64"), number(2.0, "float64")
        g, p, c, s, r, f, b = (local("float64") for _ in range(7))
        row = local("int64")
        work = scratch(1, self.s.rows, self.s.kind)
        g[0] = (d[0, first + 1] - d[0, first]) / (two * e[0, first])
        r[0] = tirx.sqrt(g[0] * g[0] + one)
        r[0] = tirx.Select(g[0] < zero, -r[0], r[0])
        g[0] = d[0, last] - d[0, first] + e[0, first] / (g[0] + r[0])
        s[0], c[0], p[0] = one, one, zero
        row[0] = last - 1
        with T.While(row[0] >= first):
            i = row[0]
            f[0], b[0] = s[0] * e[0, i], c[0] * e[0, i]
            r[0] = tirx.sqrt(f[0] * f[0] + g[0] * g[0])
            e[0, i + 1] = r[0]
            # Both vanish: the matrix has come apart here.
            whole = r[0] > zero
            s[0] = tirx.Select(whole, f[0] / r[0], zero)
            c[0] = tirx.Select(whole, g[0] / r[0], one)
            g[0] = d[0, i + 1] - p[0]
            r[0] = (d[0, i] - g[0]) * s[0] + two * c[0] * b[0]
            p[0] = s[0] * r[0]
            d[0, i + 1] = g[0] + p[0]
            g[0] = c[0] * r[0] - b[0]
            if self.v is not None:
                cosine, sine = tirx.Cast(self.v.kind, c[0]), tirx.Cast(self.v.kind, s[0])
                rotate_rows(self.v, i, i + 1, cosine, sine, work)
            row[0] = i - 1
        d[0, first] = d[0, first] - p[0]
        e[0, first] = g[0]
        e[0, last] = zero


@converts(aten._linalg_eigh.default)
def linalg_eigh(A: Any, UPLO: str = "L", compute_v: bool = True) -> Any:
    """Eigenvalues from the smallest to the largest, and vectors of length 1 as columns."""
    kind = real(A)
    if UPLO.upper() not in ("L", "U"):
        raise Unsupported(f"UPLO={UPLO!r}")
    lower = UPLO.upper() == "L"

    def before(ins: Any) -> None:
        many, size, _ = ins[0].shape
        bad = local("int64")
        bad[0] = wide(0)
        with loops([many, size, size]) as (index, i, j):
            a = Matrix(ins[0], index) if lower else Matrix(ins[0], index).mT
            finite = tirx.abs(a[i, j]) <= tirx.max_value(kind)
            # No negation: TVM makes of it a comparison the other way, which NaN fails as well.
            bad[0] += tirx.Select(finite, wide(0), tirx.Cast("int64", i >= j))
        # LAPACK has a formula of its own for two by two, which gives NaN.
        require(tirx.Or(bad[0].equal(wide(0)), wide(size) < wide(3)), _FAILED, "LinAlgError")

    def body(index: Any, ins: Any, outs: Any) -> None:
        a = Matrix(ins[0], index)
        a = a if lower else a.mT
        s = scratch(a.rows, a.rows, kind)
        order = scratch(1, a.rows, "int64")
        s.fill(lambda i, j: tirx.Select(i >= j, a[i, j], a[j, i]))
        v = None
        if compute_v:
            v = scratch(a.rows, a.rows, kind)
            v.fill(lambda i, j: tirx.Select(i.equal(j), number(1, kind), number(0, kind)))
        tridiagonal = _Tridiagonal(s, v)
        tridiagonal.reduce()
        tridiagonal.diagonalise()
        values = tridiagonal.diagonal
        ranked(values, order, a.rows, descending=False)
        with loops([a.rows]) as (i,):
            outs[0][index, i] = tirx.Cast(kind, values[0, order[0, i]])
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
