"""The singular value decomposition by one-sided Jacobi rotations.

Hestenes, J. SIAM 6, 1958: the columns of a tall matrix are turned in pairs until they are
orthogonal; their lengths are then the singular values.
"""

from __future__ import annotations

from typing import Any

import torch

from .common import converts, op, shape, shape_expr, tirx
from .linalg_eigen import EPSILON, double, ranked, rotate_rows
from .linalg_kernel import Matrix, lead, matrix_kernel, number, real, scratch, smaller
from .opaque import T, local, loops, require, wide
from .reductions import full

aten = torch.ops.aten

# Quadratic convergence needs some ten; infinities never converge.
_SWEEPS = 30


def _tangent(zeta: Any) -> Any:
    """The smaller root of ``t**2 + 2 zeta t - 1``, for zeta in float64."""
    one = number(1.0, "float64")
    size = one / (tirx.abs(zeta) + tirx.sqrt(one + zeta * zeta))
    return tirx.Select(zeta < number(0.0, "float64"), -size, size)


def _larger(a: Any, b: Any) -> Any:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else tirx.max(wide(a), wide(b))


def _either(condition: Any, yes: Any, no: Any) -> Any:
    """One of two elements, of which only the other may lie outside of its matrix."""
    if isinstance(condition, bool):
        return yes if condition else no
    return tirx.if_then_else(condition, yes, no)


def _rounding(w: Matrix) -> Any:
    """The square of a length that is nothing but rounding beside the whole matrix."""
    total = local("float64")
    total[0] = number(0.0, "float64")
    with loops([w.rows, w.columns]) as (i, k):
        total[0] = total[0] + double(w[i, k]) * double(w[i, k])
    return total[0] * number(EPSILON[w.kind] ** 2, "float64") * double(wide(w.columns))


def _orthogonalise(w: Matrix, v: Matrix | None, rounding: Any) -> None:
    """Turn the rows of `w` in pairs until they are orthogonal, and those of `v` with them.

    Rows that are rounding by themselves stay: each turn would make them anew.
    """
    kind, size = w.kind, wide(w.rows)
    work = scratch(1, _larger(w.columns, w.rows), kind)
    turned, sweep = local("int64"), local("int64")
    sums, turn = local("float64", 3), local("float64", 2)
    # A cosine of two rows below this is rounding.
    limit = number(EPSILON[kind] ** 2, "float64") * double(wide(w.columns))
    one, two = number(1.0, "float64"), number(2.0, "float64")
    turned[0], sweep[0] = wide(1), wide(0)
    with T.While(tirx.all(turned[0] > wide(0), sweep[0] < wide(_SWEEPS))):
        turned[0] = wide(0)
        sweep[0] = sweep[0] + 1
        with loops([size]) as (p,), loops([size - p - 1]) as (offset,):
            q = p + 1 + offset
            for n in range(3):
                sums[n] = number(0.0, "float64")
            with loops([w.columns]) as (k,):
                left, right = double(w[p, k]), double(w[q, k])
                sums[0] = sums[0] + left * left
                sums[1] = sums[1] + right * right
                sums[2] = sums[2] + left * right
            cosine = sums[2] * sums[2] > limit * sums[0] * sums[1]
            with T.If(tirx.all(cosine, tirx.min(sums[0], sums[1]) > rounding)), T.Then():
                turned[0] = wide(1)
                turn[0] = _tangent((sums[1] - sums[0]) / (two * sums[2]))
                turn[1] = one / tirx.sqrt(one + turn[0] * turn[0])
                c, s = tirx.Cast(kind, turn[1]), tirx.Cast(kind, turn[0] * turn[1])
                rotate_rows(w, p, q, c, s, work)
                if v is not None:
                    rotate_rows(v, p, q, c, s, work)


def _complete(rows: Matrix, known: Any) -> None:
    """Let the rows behind the `known` first ones be orthogonal to all before, of length 1."""
    kind, width = rows.kind, rows.columns
    best, place, total = local("float64"), local("int64"), local("float64")
    with loops([wide(rows.rows) - known]) as (step,):
        row = known + step
        # The axis that is furthest from the rows so far.
        best[0], place[0] = number(-1.0, "float64"), wide(0)
        with loops([width]) as (k,):
            total[0] = number(1.0, "float64")
            with loops([row]) as (r,):
                total[0] = total[0] - double(rows[r, k]) * double(rows[r, k])
            with T.If(total[0] > best[0]), T.Then():
                best[0] = total[0]
                place[0] = k
        with loops([width]) as (k,):
            one, zero = number(1, kind), number(0, kind)
            rows[row, k] = tirx.Select(k.equal(place[0]), one, zero)
        for _ in range(2):  # once more for what rounding has left
            with loops([row]) as (r,):
                total[0] = number(0.0, "float64")
                with loops([width]) as (k,):
                    total[0] = total[0] + double(rows[r, k]) * double(rows[row, k])
                rows.add_row(row, -tirx.Cast(kind, total[0]), rows, r)
        total[0] = number(0.0, "float64")
        with loops([width]) as (k,):
            total[0] = total[0] + double(rows[row, k]) * double(rows[row, k])
        total[0] = tirx.sqrt(total[0])
        with loops([width]) as (k,):
            rows[row, k] = tirx.Cast(kind, double(rows[row, k]) / total[0])


def _decompose(a: Matrix, values: Any, index: Any, u: Matrix | None, vh: Matrix | None) -> None:
    kind = a.kind
    short, long = smaller(a.rows, a.columns), _larger(a.rows, a.columns)
    tall = a.rows >= a.columns
    w = scratch(short, long, kind)
    w.fill(lambda i, j: _either(tall, a[j, i], a[i, j]))
    v = None
    if u is not None:
        v = scratch(short, short, kind)
        v.fill(lambda i, j: tirx.Select(i.equal(j), number(1, kind), number(0, kind)))
    rounding = _rounding(w)
    _orthogonalise(w, v, rounding)
    lengths, order = scratch(1, short, kind), scratch(1, short, "int64")
    total, known = local("float64"), local("int64")
    with loops([short]) as (i,):
        total[0] = number(0.0, "float64")
        with loops([long]) as (k,):
            total[0] = total[0] + double(w[i, k]) * double(w[i, k])
        lengths[0, i] = tirx.Cast(kind, tirx.sqrt(total[0]))
    ranked(lengths, order, short, descending=True)
    with loops([short]) as (i,):
        values[index, i] = lengths[0, order[0, i]]
    if u is None or vh is None or v is None:
        return
    # Vectors of the longer side, as rows; there may be more of them than singular values.
    whole = scratch(_larger(u.columns, vh.rows), long, kind)
    known[0] = wide(0)
    with (
        loops([short]) as (i,),
        T.If(double(values[index, i]) * double(values[index, i]) > rounding),
        T.Then(),
    ):
        known[0] = i + 1
        with loops([long]) as (k,):
            whole[i, k] = w[order[0, i], k] / values[index, i]
    _complete(whole, known[0])
    right = v
    u.fill(lambda i, j: _either(tall, whole[j, i], right[order[0, j], i]))
    vh.fill(lambda i, j: _either(tall, right[order[0, i], j], whole[i, j]))


@converts(aten._linalg_svd.default)
def linalg_svd(
    A: Any, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> Any:
    """U, the singular values from the largest to the smallest, and V transposed."""
    kind = real(A)
    nothing = full([0], 0, kind)
    if compute_uv and any(isinstance(s, int) and s == 0 for s in shape(A)):
        return _of_nothing(A, full_matrices)

    def outputs(sizes: Any) -> Any:
        rows, columns = sizes
        short = smaller(rows, columns)
        left, right = (rows, columns) if full_matrices else (short, short)
        if not compute_uv:
            return [([short], kind)]
        return [([rows, left], kind), ([short], kind), ([right, columns], kind)]

    def before(ins: Any) -> None:
        bad = local("int64")
        bad[0] = wide(0)
        with loops([*ins[0].shape]) as at:
            bad[0] += tirx.Cast("int64", tirx.isnan(ins[0][tuple(at)]))
        require(bad[0].equal(wide(0)), _NOT_FINITE, "LinAlgError")

    def body(index: Any, ins: Any, outs: Any) -> None:
        a = Matrix(ins[0], index)
        if compute_uv:
            _decompose(a, outs[1], index, Matrix(outs[0], index), Matrix(outs[2], index))
        else:
            _decompose(a, outs[0], index, None, None)

    found = matrix_kernel(
        "svd",
        body,
        [A],
        outputs,
        aten._linalg_svd.default,
        batch=lead(A),
        results=None if compute_uv else [1],
        before=before,
        full_matrices=full_matrices,
        compute_uv=compute_uv,
        driver=driver,
    )
    return tuple(found) if compute_uv else (nothing, found[0], nothing)


def _of_nothing(a: Any, full_matrices: bool) -> Any:
    """What a matrix without elements is the product of: identities, as far as there is any."""
    kind, (*batch, rows, columns) = real(a), shape(a)
    short = smaller(rows, columns)
    left, right = (rows, columns) if full_matrices else (short, short)

    def eye(*sizes: Any) -> Any:
        return op.broadcast_to(op.eye(*sizes, dtype=kind), shape_expr([*batch, *sizes]))

    return eye(rows, left), full([*batch, short], 0, kind), eye(right, columns)


_NOT_FINITE = (
    "linalg.svd: The algorithm failed to converge because the input matrix contained "
    "non-finite values."
)
