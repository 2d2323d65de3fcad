"""The exponential of a matrix, by scaling and squaring."""

from __future__ import annotations

import math
from typing import Any

import torch

from .common import converts, tirx
from .linalg_kernel import Matrix, lead, matrix_kernel, number, real, scratch
from .opaque import T, local, loops, wide

aten = torch.ops.aten

# The Taylor polynomial of degree 16 (Paterson and Stockmeyer, SIAM J. Comput. 2, 1973, in the
# fourth power) leaves an error of at most norm**17 / 17!: far below one rounding for these norms.
_DEGREE, _STEP = 16, 4
_LARGEST_NORM = {"float32": 1.0, "float64": 0.5}
# More halvings than the exponents of float64: for a norm that is infinite.
_MOST_HALVINGS = 1100


def _multiply(result: Matrix, a: Matrix, b: Matrix) -> None:
    factor = local(result.kind)
    result.fill(lambda i, j: number(0, result.kind))
    with loops([a.rows, a.columns]) as (i, k):
        factor[0] = a[i, k]
        result.add_row(i, factor[0], b, k)


def _scale(a: Matrix) -> Any:
    """Halve a matrix until its 1-norm is small; how often."""
    kind = a.kind
    norm, total, factor, halvings = local(kind), local(kind), local(kind), local("int64")
    norm[0] = number(0, kind)
    with loops([a.columns]) as (j,):
        total[0] = number(0, kind)
        with loops([a.rows]) as (i,):
            total[0] = total[0] + tirx.abs(a[i, j])
        norm[0] = tirx.max(norm[0], total[0])
    halvings[0] = wide(0)
    factor[0] = number(1, kind)
    limit = number(_LARGEST_NORM[kind], kind)
    with T.While(tirx.all(norm[0] > limit, halvings[0] < wide(_MOST_HALVINGS))):
        norm[0] = norm[0] * number(0.5, kind)
        factor[0] = factor[0] * number(0.5, kind)
        halvings[0] = halvings[0] + 1
    a.fill(lambda i, j: a[i, j] * factor[0])
    return halvings


def _exponential(x: Matrix, result: Matrix) -> None:
    kind, size = x.kind, x.rows
    a, square, cube, fourth, other = (scratch(size, size, kind) for _ in range(5))
    a.copy(x)
    halvings = _scale(a)
    _multiply(square, a, a)
    _multiply(cube, square, a)
    _multiply(fourth, square, square)

    def term(power: int, i: Any, j: Any) -> Any:
        """Four terms of the polynomial, from a power that is a multiple of four."""
        c = [number(1.0 / math.factorial(power + n), kind) for n in range(_STEP)]
        one = tirx.Select(i.equal(j), c[0], number(0, kind))
        return one + c[1] * a[i, j] + c[2] * square[i, j] + c[3] * cube[i, j]

    highest = number(1.0 / math.factorial(_DEGREE), kind)
    result.fill(lambda i, j: highest * fourth[i, j] + term(_DEGREE - _STEP, i, j))
    for power in range(_DEGREE - 2 * _STEP, -1, -_STEP):
        _multiply(other, result, fourth)
        result.fill(lambda i, j, p=power: other[i, j] + term(p, i, j))  # type: ignore[misc]
    with T.While(halvings[0] > wide(0)):
        _multiply(other, result, result)
        result.copy(other)
        halvings[0] = halvings[0] - 1


@converts(aten.linalg_matrix_exp.default)
def linalg_matrix_exp(self: Any) -> Any:
    """The sum of ``self**k / k!``."""
    kind = real(self)

    def body(index: Any, ins: Any, outs: Any) -> None:
        _exponential(Matrix(ins[0], index), Matrix(outs[0], index))

    return matrix_kernel(
        "matrix_exp",
        body,
        [self],
        lambda sizes: [(sizes, kind)],
        aten.linalg_matrix_exp.default,
        batch=lead(self),
    )[0]
