"""The factorisation of symmetric indefinite matrices, storage and pivots as in LAPACK.

Bunch and Kaufman, Math. Comp. 31, 1977: the diagonal is of numbers and of blocks of two by two,
whose two pivots are negative.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .common import converts, emit, tirx
from .linalg_errors import checked
from .linalg_kernel import Matrix, expanded, lead, matrix_kernel, number, real, together
from .linalg_lu import row_of
from .opaque import T, local, loops, wide

aten = torch.ops.aten

# Bounds the growth of elements best.
_ALPHA = (1.0 + math.sqrt(17.0)) / 8.0


def _exchange(a: Matrix, one: tuple[Any, Any], two: tuple[Any, Any], held: Any) -> None:
    held[0] = a[one]
    a[one] = a[two]
    a[two] = held[0]


class _Factorisation:
    """The statements that factorise the lower triangle of one matrix in place."""

    def __init__(self, a: Matrix) -> None:
        self.a, self.kind, self.size = a, a.kind, wide(a.rows)
        self.k, self.step, self.pivot, self.far = (local("int64") for _ in range(4))
        self.held, self.column, self.row = (local(a.kind) for _ in range(3))
        self.block = local(a.kind, 5)

    def run(self, pivots: Any, info: Any, index: Any) -> None:
        a, k, zero = self.a, self.k, number(0, self.kind)
        k[0] = wide(0)
        info[index] = tirx.const(0, "int32")
        with T.While(k[0] < self.size):
            self.step[0] = wide(1)
            self.pivot[0] = k[0]
            self.largest_below()
            with T.If(tirx.max(tirx.abs(a[k[0], k[0]]), self.column[0]) > zero):
                with T.Then():
                    self.choose()
                    self.interchange()
                    with T.If(self.step[0].equal(wide(1))):
                        with T.Then():
                            self.eliminate()
                        with T.Else():
                            self.eliminate_two()
                with T.Else(), T.If(info[index].equal(tirx.const(0, "int32"))), T.Then():
                    info[index] = tirx.Cast("int32", k[0] + 1)
            found = tirx.Cast("int32", self.pivot[0] + 1)
            with T.If(self.step[0].equal(wide(1))):
                with T.Then():
                    pivots[index, k[0]] = found
                with T.Else():
                    pivots[index, k[0]] = -found
                    pivots[index, k[0] + 1] = -found
            k[0] = k[0] + self.step[0]

    def largest_below(self) -> None:
        """The largest element below the diagonal of column k, and its row."""
        a, k = self.a, self.k[0]
        self.column[0], self.far[0] = number(0, self.kind), k
        with loops([self.size - k - 1]) as (i,):
            size = tirx.abs(a[k + 1 + i, k])
            with T.If(size > self.column[0]), T.Then():
                self.column[0] = size
                self.far[0] = k + 1 + i

    def choose(self) -> None:
        """The pivot: element k itself, another one of the diagonal, or a block of two."""
        a, k, far = self.a, self.k[0], self.far[0]
        alpha, own = number(_ALPHA, self.kind), tirx.abs(a[k, k])
        with T.If(own < alpha * self.column[0]), T.Then():
            self.row[0] = number(0, self.kind)
            with loops([far - k]) as (j,):
                self.row[0] = tirx.max(self.row[0], tirx.abs(a[far, k + j]))
            with loops([self.size - far - 1]) as (i,):
                self.row[0] = tirx.max(self.row[0], tirx.abs(a[far + 1 + i, far]))
            enough = alpha * self.column[0] * (self.column[0] / self.row[0])
            with T.If(own < enough), T.Then():
                self.pivot[0] = far
                with T.If(tirx.abs(a[far, far]) < alpha * self.row[0]), T.Then():
                    self.step[0] = wide(2)

    def interchange(self) -> None:
        """Let the pivot's row and column change places with those it goes to."""
        a, k, other, held = self.a, self.k[0], self.pivot[0], self.held
        place = k + self.step[0] - 1
        with T.If(other != place), T.Then():
            with loops([self.size - other - 1]) as (i,):
                _exchange(a, (other + 1 + i, place), (other + 1 + i, other), held)
            with loops([other - place - 1]) as (i,):
                _exchange(a, (place + 1 + i, place), (other, place + 1 + i), held)
            _exchange(a, (place, place), (other, other), held)
            with T.If(self.step[0].equal(wide(2))), T.Then():
                _exchange(a, (k + 1, k), (other, k), held)

    def eliminate(self) -> None:
        """Subtract what column k explains of the rest, and divide the column."""
        a, k, held = self.a, self.k[0], self.held
        with loops([self.size - k - 1]) as (offset,):
            j = k + 1 + offset
            held[0] = a[j, k] / a[k, k]
            with loops([self.size - j]) as (i,):
                a[j + i, j] = a[j + i, j] - a[j + i, k] * held[0]
            # The rows below still need the column as it was, this one is done.
            a[j, k] = held[0]

    def eliminate_two(self) -> None:
        """The same for columns k and k + 1."""
        a, k, block, one = self.a, self.k[0], self.block, number(1, self.kind)
        block[0] = a[k + 1, k]
        block[1] = a[k + 1, k + 1] / block[0]
        block[2] = a[k, k] / block[0]
        block[0] = one / (block[1] * block[2] - one) / block[0]
        with loops([self.size - k - 2]) as (offset,):
            j = k + 2 + offset
            block[3] = block[0] * (block[1] * a[j, k] - a[j, k + 1])
            block[4] = block[0] * (block[2] * a[j, k + 1] - a[j, k])
            with loops([self.size - j]) as (i,):
                taken = a[j + i, k] * block[3] + a[j + i, k + 1] * block[4]
                a[j + i, j] = a[j + i, j] - taken
            a[j, k] = block[3]
            a[j, k + 1] = block[4]


@converts(aten.linalg_ldl_factor_ex.default)
def linalg_ldl_factor_ex(self: Any, *, hermitian: bool = False, check_errors: bool = False) -> Any:
    """L and D in one lower triangle, the pivots, and 0 or the first pivot that is 0."""
    kind = real(self)

    def body(index: Any, ins: Any, outs: Any) -> None:
        given, a = Matrix(ins[0], index), Matrix(outs[0], index)
        a.fill(lambda i, j: tirx.Select(i >= j, given[i, j], number(0, kind)))
        _Factorisation(a).run(outs[1], outs[2], index)

    factors, pivots, info = matrix_kernel(
        "ldl_factor",
        body,
        [self],
        lambda sizes: [(sizes, kind), (sizes[:1], "int32"), ((), "int32")],
        aten.linalg_ldl_factor_ex.default,
        batch=lead(self),
        hermitian=hermitian,
    )
    if check_errors:
        factors = checked(factors, info, "torch.linalg.ldl_factor_ex")
    return factors, pivots, info


def _forward(a: Matrix, pivots: Any, index: Any, x: Matrix) -> None:
    """``x = inverse(D) inverse(L) x``, with the exchanges in their order."""
    kind, size = x.kind, wide(a.rows)
    k, f, b = local("int64"), local(kind), local(kind, 6)
    one = number(1, kind)
    k[0] = wide(0)
    with T.While(k[0] < size):
        at = k[0]
        with T.If(pivots[index, at] > tirx.const(0, "int32")):
            with T.Then():
                x.swap_rows(at, row_of(pivots[index, at], size))
                with loops([size - at - 1]) as (i,):
                    f[0] = -a[at + 1 + i, at]
                    x.add_row(at + 1 + i, f[0], x, at)
                with loops([x.columns]) as (j,):
                    x[at, j] = x[at, j] / a[at, at]
                k[0] = at + 1
            with T.Else():
                x.swap_rows(at + 1, row_of(-pivots[index, at], size))
                with loops([size - at - 2]) as (i,):
                    f[0] = -a[at + 2 + i, at]
                    x.add_row(at + 2 + i, f[0], x, at)
                    f[0] = -a[at + 2 + i, at + 1]
                    x.add_row(at + 2 + i, f[0], x, at + 1)
                b[0] = a[at + 1, at]
                b[1] = a[at, at] / b[0]
                b[2] = a[at + 1, at + 1] / b[0]
                b[3] = b[1] * b[2] - one
                with loops([x.columns]) as (j,):
                    b[4] = x[at, j] / b[0]
                    b[5] = x[at + 1, j] / b[0]
                    x[at, j] = (b[2] * b[4] - b[5]) / b[3]
                    x[at + 1, j] = (b[1] * b[5] - b[4]) / b[3]
                k[0] = at + 2


def _backward(a: Matrix, pivots: Any, index: Any, x: Matrix) -> None:
    """``x = inverse(L.T) x``, with the exchanges in the opposite order."""
    size = wide(a.rows)
    k, f = local("int64"), local(x.kind)
    k[0] = size - 1

    def subtract(row: Any, last: Any) -> None:
        with loops([size - last - 1]) as (i,):
            f[0] = -a[last + 1 + i, row]
            x.add_row(row, f[0], x, last + 1 + i)

    with T.While(k[0] >= wide(0)):
        at = k[0]
        subtract(at, at)
        with T.If(pivots[index, at] > tirx.const(0, "int32")):
            with T.Then():
                x.swap_rows(at, row_of(pivots[index, at], size))
                k[0] = at - 1
            with T.Else():
                subtract(at - 1, at)
                x.swap_rows(at, row_of(-pivots[index, at], size))
                k[0] = at - 2


@converts(aten.linalg_ldl_solve.default)
def linalg_ldl_solve(LD: Any, pivots: Any, B: Any, *, hermitian: bool = False) -> Any:
    """The solution of ``A @ X = B`` from A's factors."""
    kind = real(LD, B)
    (factors, b), batch = together(LD, B)
    pivots = emit(expanded(pivots, batch, core=1))

    def body(index: Any, ins: Any, outs: Any) -> None:
        a, x = Matrix(ins[0], index), Matrix(outs[0], index)
        x.copy(Matrix(ins[2], index))
        _forward(a, ins[1], index, x)
        _backward(a, ins[1], index, x)

    return matrix_kernel(
        "ldl_solve",
        body,
        [factors, pivots, b],
        lambda _, __, sizes: [(sizes, kind)],
        aten.linalg_ldl_solve.default,
        batch=batch,
        hermitian=hermitian,
    )[0]
