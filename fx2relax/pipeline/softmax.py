"""Softmax on processors: rows are multiplied by the inverses of their sums."""

from __future__ import annotations

from typing import Any

from tvm import te, tirx


def softmax(builder: Any, call: Any) -> Any:
    """A kernel for a call of ``relax.nn.softmax``, given a block builder.

    TVM's divides each element, which takes a vector of 16 as long as its exponential. A sum lies
    between 1 and the length of its row, or is NaN, so that its inverse neither overflows nor is
    subnormal; the product is within 1 ulp of the quotient, and is it where all terms are equal.
    """
    return builder.call_te(
        _softmax, call.args[0], int(call.attrs.axis), primfunc_name_hint="softmax"
    )


def _softmax(x: Any, axis: int) -> Any:
    axis %= len(x.shape)
    rows = [size for i, size in enumerate(x.shape) if i != axis]
    k, n = (te.reduce_axis((0, x.shape[axis]), name=name) for name in ("k", "n"))

    def at(row: Any, column: Any) -> Any:
        return (*row[:axis], column, *row[axis:])

    def row_of(place: Any) -> Any:
        return (*place[:axis], *place[axis + 1 :])

    top = te.compute(rows, lambda *row: te.max(x(*at(row, k)), axis=k), name="top")
    raised = te.compute(
        x.shape, lambda *place: tirx.exp(x(*place) - top(*row_of(place))), name="raised"
    )
    total = te.compute(rows, lambda *row: te.sum(raised(*at(row, n)), axis=n), name="total")
    inverse = te.compute(rows, lambda *row: tirx.const(1, x.dtype) / total(*row), name="inverse")
    return te.compute(
        x.shape, lambda *place: raised(*place) * inverse(*row_of(place)), name="weights"
    )
