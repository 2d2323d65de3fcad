"""What the kernels of recurrent layers share: blocks of rows, products with a packed weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fx2relax.elements import Elements

from .common import Unsupported, compute_dtype, dtype, op, shape, te, te_call, tirx
from .opaque import T, local, loops, require, wide

# The loop mark that the pipeline turns into vector code with a scalar tail.
_VECTOR = {"fx2relax.vector": 1}
# A weight of more bytes does not stay in a core's cache from one time step to the next.
_CACHED = 1 << 20
# Multiplying by a weight of fewer bytes takes less time than handing parts of it to threads.
_SHARED = 1 << 17
_ROWS = 4


def lanes(kind: str) -> int:
    """How many columns a product computes at a time: two registers of AVX-512."""
    return 16 if kind == "float64" else 32


def static(sizes: Sequence[Any]) -> list[int]:
    """Sizes that have to be known before the call."""
    if not all(isinstance(s, int) for s in sizes):
        raise Unsupported("a recurrent layer whose weights have symbolic sizes")
    return list(sizes)


def padded(count: Any, step: int) -> Any:
    """A size rounded up to a multiple."""
    if isinstance(count, int):
        return -(-count // step) * step
    return tirx.floordiv(count + (step - 1), step) * step


def packed(weight: Any, transposed: bool) -> Any:
    """A weight as panels of columns: (panels, rows, lanes), zeros beyond its end.

    `transposed`: the product is with the weight's transpose, as in a linear layer.
    """
    kind = compute_dtype(dtype(weight))
    rows, columns = static(shape(weight))[:: -1 if transposed else 1]
    width = lanes(kind)

    def kernel(w: Any) -> Any:
        def element(panel: Any, row: Any, lane: Any) -> Any:
            column = panel * width + lane
            value = w(column, row) if transposed else w(row, column)
            value = value if str(w.dtype) == kind else tirx.Cast(kind, value)
            return tirx.if_then_else(column < columns, value, tirx.const(0, kind))

        return te.compute((padded(columns, width) // width, rows, width), element, name="panels")

    return te_call(kernel, weight, primfunc_name_hint="pack_recurrent_weight")


def row_block(batch: Any) -> int:
    """How many rows of a batch are computed together."""
    if not isinstance(batch, int):
        return _ROWS
    blocks = -(-batch // _ROWS)
    return max(-(-batch // max(blocks, 1)), 1)


def runs_by_rows(batch: Any, rows: int, columns: int, kind: str) -> bool:
    """Whether each block of rows runs through all steps alone, or threads share each step.

    `rows` and `columns` are the weight's. Where there is one block, one thread would do it all.
    """
    size = rows * columns * (8 if kind == "float64" else 4)
    return size <= (_SHARED if is_one_block(batch) else _CACHED)


def is_one_block(batch: Any) -> bool:
    """Whether all rows of a batch are computed together."""
    return isinstance(batch, int) and batch <= _ROWS


def vector(count: Any) -> Any:
    """A loop to become vector code."""
    return T.serial(wide(0), wide(count), annotations=_VECTOR)


def panel_product(
    left: Any, right: Any, out: Any, base: Any, panel: Any, rows: int, inner: int, stride: int
) -> None:
    """One panel of columns of ``out = left @ right`` for `rows` rows from `base`.

    The sums stay in registers: everything around them is unrolled.
    """
    kind = str(right.dtype)
    width = lanes(kind)
    sums = Elements(T.alloc_buffer((rows * width,), kind, scope="local"))

    def each(body: Callable[[Any, Any], None]) -> None:
        with T.unroll(0, rows) as r, T.vectorized(0, width) as lane:
            body(r, lane)

    def clear(r: Any, lane: Any) -> None:
        sums[r * width + lane] = tirx.const(0, kind)

    def store(r: Any, lane: Any) -> None:
        out[(base + r) * stride + panel * width + lane] = sums[r * width + lane]

    each(clear)
    with loops([inner]) as (k,):

        def add(r: Any, lane: Any) -> None:
            at = r * width + lane
            product = left[(base + r) * inner + k] * right[(panel * inner + k) * width + lane]
            sums[at] = sums[at] + product

        each(add)
    each(store)


class Steps:
    """The time steps of a layer: which rows each has and where they lie.

    Dense input has the whole batch at each step. Packed input has ever fewer rows: `counts` says
    how many, `starts` where the first one is.
    """

    def __init__(self, number: Any, batch: Any, packing: Sequence[Any], reverse: bool) -> None:
        self.number, self.batch, self.reverse = number, batch, reverse
        self.packing = packing

    def check(self, total: Any) -> None:
        """Raise where batch sizes do not fit the data."""
        if not self.packing:
            return
        counts, starts = self.packing
        bad = local("int64")
        bad[0] = wide(0)
        with loops([self.number]) as (t,):
            wrong = tirx.Or(counts[t] < 0, counts[t] > wide(self.batch))
            wrong = tirx.Or(wrong, starts[t] + counts[t] > wide(total))
            bad[0] += tirx.Cast("int64", wrong)
        require(bad[0].equal(wide(0)), "the batch sizes do not fit the packed sequences")

    def at(self, index: Any) -> tuple[Any, Any]:
        """The first row and the number of rows of the step that is run as number `index`."""
        t = wide(self.number) - 1 - index if self.reverse else index
        if not self.packing:
            return t * wide(self.batch), wide(self.batch)
        counts, starts = self.packing
        return starts[t], counts[t]

    def active(self, index: Any, base: Any, rows: int, body: Callable[[Any, Any], None]) -> None:
        """``body(row, place)`` for those of some rows from `base` that a step has."""
        start, count = self.at(index)
        with loops([rows]) as (r,), T.If(base + r < count), T.Then():
            body(base + r, start + base + r)


def packing_of(batch_sizes: Any) -> list[Any]:
    """Counts and starts of packed input's steps; none for dense input."""
    if batch_sizes is None:
        return []
    ends = op.cumsum(batch_sizes, 0)
    return [batch_sizes, op.subtract(ends, batch_sizes)]
