"""Kernels on batches of matrices, each with the LAPACK call that computes the same.

A kernel is written as loops over the matrices of a batch, so that it runs anywhere. It carries the
ATen operator that PyTorch has for it: the pipeline may call that in its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from fx2relax.compat import IRBuilder, const_int, relax
from fx2relax.elements import Elements

from .common import (
    Unsupported,
    dtype,
    emit,
    ndim,
    op,
    product,
    reshape,
    shape,
    shape_expr,
    te,
    te_call,
    tirx,
)
from .indices import broadcast_sizes
from .opaque import T, is_large, local, loops, wide

LAPACK = "fx2relax.lapack"

_OPAQUE = 8
_VECTOR = {"fx2relax.vector": 1}
_FLOATS = ("float32", "float64")

Sizes = Sequence[Any]


class Matrix:
    """One matrix of a batch inside of a kernel, or its transpose: indexed and assigned."""

    def __init__(self, buffer: Any, *lead: Any, transposed: bool = False) -> None:
        self.buffer, self.lead, self.transposed = buffer, lead, transposed
        rows, columns = [const_int(s) for s in list(buffer.shape)[-2:]]
        self.rows, self.columns = (columns, rows) if transposed else (rows, columns)
        self.kind = str(buffer.dtype)

    @property
    def mT(self) -> Matrix:
        """The transpose, in the same memory."""
        return Matrix(self.buffer, *self.lead, transposed=not self.transposed)

    def _place(self, at: tuple[Any, Any]) -> tuple[Any, ...]:
        return (*self.lead, at[1], at[0]) if self.transposed else (*self.lead, *at)

    def __getitem__(self, at: tuple[Any, Any]) -> Any:
        return self.buffer[self._place(at)]

    def __setitem__(self, at: tuple[Any, Any], value: Any) -> None:
        self.buffer[self._place(at)] = value

    def along_row(self, count: Any) -> Any:
        """A loop over elements of a row whose turns do not depend on each other."""
        if self.transposed:
            return T.serial(wide(0), wide(count))
        return T.serial(wide(0), wide(count), annotations=_VECTOR)

    def fill(self, value: Callable[[Any, Any], Any]) -> None:
        """Set every element."""
        with loops([self.rows]) as (i,), self.along_row(self.columns) as j:
            self[i, j] = value(i, j)

    def copy(self, other: Matrix) -> None:
        """Set every element from a matrix of the same size."""
        self.fill(lambda i, j: other[i, j])

    def add_row(self, to: Any, factor: Any, other: Matrix, row: Any, start: Any = 0) -> None:
        """Add a multiple of another matrix's row to one of this one's, from a column on."""
        with self.along_row(wide(self.columns) - wide(start)) as j:
            column = wide(start) + j
            self[to, column] = self[to, column] + factor * other[row, column]

    def swap_rows(self, one: Any, two: Any) -> None:
        """Let two rows change places."""
        held = local(self.kind)
        with loops([self.columns]) as (j,):
            held[0] = self[one, j]
            self[one, j] = self[two, j]
            self[two, j] = held[0]


def scratch(rows: Any, columns: Any, kind: str) -> Matrix:
    """A matrix that one turn of a loop has to itself; at least one element."""
    sizes = [max(s, 1) if isinstance(s, int) else tirx.max(s, wide(1)) for s in (rows, columns)]
    buffer = Elements(T.alloc_buffer([wide(s) for s in sizes], kind, scope="global"))
    matrix = Matrix(buffer)
    matrix.rows, matrix.columns = rows, columns
    return matrix


def number(value: float, kind: str) -> Any:
    """A TIR constant."""
    return tirx.const(value, kind)


def smaller(a: Any, b: Any) -> Any:
    """The smaller of two sizes."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else tirx.min(wide(a), wide(b))


def matrix_kernel(
    name: str,
    body: Callable[..., None],
    inputs: Sequence[Any],
    outputs: Callable[..., Sequence[tuple[Sizes, str]]],
    lapack: Any = None,
    *,
    batch: Sizes,
    results: Sequence[int] | None = None,
    before: Callable[[Sequence[Any]], None] | None = None,
    **arguments: Any,
) -> list[Any]:
    """A kernel that does the same to each matrix of a batch.

    Args:
        name: the kernel's name in the module.
        body: called once as ``body(b, inputs, outputs)`` with the index of a matrix and buffers
            of shape (batch, ...); emits the statements.
        inputs: Relax tensors, their batch axes those of `batch`.
        outputs: from the inputs' shapes, less the batch, to each output's shape and dtype.
        lapack: the ATen overload that computes the same from the same tensors, if there is one.
        batch: the sizes of the batch axes.
        results: which of its results the outputs are; the first ones, when left out.
        before: emits assertions on the inputs; what runs in another thread cannot raise.
        arguments: what else it takes.

    Returns:
        the outputs, with the batch axes.
    """
    count = product(batch)
    flat = [reshape(x, [count, *shape(x)[len(batch) :]]) for x in inputs]
    specs = outputs(*[shape(x)[1:] for x in flat])
    if any(isinstance(s, int) and s == 0 for x in flat for s in shape(x)) or any(
        isinstance(s, int) and s == 0 for sizes, _ in specs for s in sizes
    ):
        return [op.zeros(shape_expr([*batch, *sizes]), kind) for sizes, kind in specs]

    def kernel(*tensors: Any) -> Any:
        sizes = [[const_int(s) for s in t.shape] for t in tensors]
        many = sizes[0][0]
        made = outputs(*[s[1:] for s in sizes])

        def statements(ins: Any, outs: Any) -> Any:
            with IRBuilder() as builder:
                with T.attr(0, "fx2relax", "statements"):
                    ins, outs = ([Elements(x) for x in group] for group in (ins, outs))
                    if before is not None:
                        before(ins)
                    shared = 0 if many != 1 and is_large(product(sizes[0])) else None
                    with loops([many], parallel=shared) as (b,):
                        body(b, ins, outs)
                return builder.get().body

        return te.extern(
            [[many, *rest] for rest, _ in made],
            list(tensors),
            statements,
            dtype=[kind for _, kind in made],
            name=name,
        )

    kernel.__name__ = name
    attrs: dict[str, Any] = {"tirx.is_scheduled": True, "op_pattern": _OPAQUE}
    if lapack is not None:
        attrs[LAPACK] = json.dumps(
            {
                "target": lapack._schema.name.split("::")[1],
                "overload": lapack._overloadname,
                "arguments": arguments,
                "results": list(results if results is not None else range(len(specs))),
                "single": not batch,  # a matrix by itself, whose errors name no batch element
            }
        )
    whole = emit(te_call(kernel, *flat, primfunc_attrs=attrs))
    parts = (
        [whole] if len(specs) == 1 else [relax.TupleGetItem(whole, i) for i in range(len(specs))]
    )
    return [
        reshape(emit(part), [*batch, *sizes]) for part, (sizes, _) in zip(parts, specs, strict=True)
    ]


def lead(x: Any, core: int = 2) -> list[Any]:
    """The batch axes of a tensor of matrices, or of vectors."""
    return shape(x)[: ndim(x) - core]


def together(*tensors: Any) -> tuple[list[Any], list[Any]]:
    """Batches of matrices broadcast to one batch; its sizes."""
    batch = broadcast_sizes([lead(x) for x in tensors])
    return [expanded(x, batch) for x in tensors], batch


def expanded(x: Any, batch: Sizes, core: int = 2) -> Any:
    """A tensor of matrices, or of vectors, with other batch axes."""
    if lead(x, core) == list(batch):
        return x
    return emit(op.broadcast_to(x, shape_expr([*batch, *shape(x)[ndim(x) - core :]])))


def real(*tensors: Any) -> str:
    """The one dtype of matrices; declines those that LAPACK does not take."""
    kinds = {dtype(x) for x in tensors}
    if len(kinds) != 1 or not kinds <= set(_FLOATS):
        raise Unsupported(f"matrices of {', '.join(sorted(kinds))}")
    return kinds.pop()


def identity(batch: Sizes, size: Any, kind: str) -> Any:
    """A batch of identity matrices."""
    eye = emit(op.eye(size, dtype=kind))
    return op.broadcast_to(eye, shape_expr([*batch, size, size])) if batch else eye
