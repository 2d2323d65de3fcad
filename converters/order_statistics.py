"""The median, the k-th smallest element and the most frequent one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fx2relax.compat import IRBuilder, T
from fx2relax.elements import Elements

from .common import (
    cast,
    converts,
    dtype,
    emit,
    is_float,
    ndim,
    normalize_axis,
    op,
    product,
    relax,
    reshape,
    shape,
    te,
    te_call,
    tirx,
)
from .ordering import sorted_with_index
from .reductions import full, wide

aten = torch.ops.aten

Rank = Callable[[Any, Any], Any]


def _te_statistic(x: Any, order: Any, nans: Any, axis: int, keepdim: bool, rank: Rank) -> Any:
    sizes = [1 if d == axis else s for d, s in enumerate(x.shape) if keepdim or d != axis]

    def at(indices: tuple[Any, ...], position: Any) -> list[Any]:
        others = [i for d, i in enumerate(indices) if not (keepdim and d == axis)]
        return [*others[:axis], position, *others[axis:]]

    def index_of(*i: Any) -> Any:
        return order(*at(i, rank(tirx.Cast("int64", x.shape[axis]), nans(*at(i, 0)))))

    index = te.compute(sizes, index_of, name="statistic_index")
    value = te.compute(sizes, lambda *i: x(*at(i, index(*i))), name="statistic")
    return [value, index]


def _statistic(x: Any, dim: int, keepdim: bool, rank: Rank) -> tuple[Any, Any]:
    """The element whose place in the sorted axis is `rank(length, count of NaN)`, and its index."""
    if ndim(x) == 0:
        return x, full([], 0, "int64")
    axis = normalize_axis(dim, ndim(x))
    sizes = [1 if i == axis else s for i, s in enumerate(shape(x))]
    left = [s for i, s in enumerate(sizes) if keepdim or i != axis]
    if any(s == 0 for s in left):
        return full(left, 0, dtype(x)), full(left, 0, "int64")
    order = sorted_with_index(x, axis, False)[1]
    if is_float(x):
        nans = op.sum(cast(op.isnan(wide(x)), "int64"), [axis], keepdims=True)
    else:
        nans = full(sizes, 0, "int64")
    both = emit(
        te_call(
            lambda value, index, count: _te_statistic(value, index, count, axis, keepdim, rank),
            x,
            order,
            nans,
            primfunc_name_hint="order_statistic",
        )
    )
    return relax.TupleGetItem(both, 0), relax.TupleGetItem(both, 1)


def _median_rank(length: Any, nans: Any) -> Any:
    return tirx.Select(nans > 0, length - nans, (length - 1) // 2)


def _nanmedian_rank(length: Any, nans: Any) -> Any:
    return tirx.max(length - nans - 1, tirx.const(0, "int64")) // 2


def _register_median(name: str, rank: Rank) -> None:
    packet = getattr(aten, name)

    @converts(packet.dim)
    def over_axis(self: Any, dim: int, keepdim: bool = False) -> Any:
        """The lower of two middle elements."""
        return _statistic(self, dim, keepdim, rank)

    @converts(packet.default)
    def of_all(self: Any) -> Any:
        """The median of nothing is NaN, or the smallest integer."""
        if any(s == 0 for s in shape(self)):
            kind = dtype(self)
            lowest = float("nan") if is_float(self) else torch.iinfo(getattr(torch, kind)).min
            return full([], lowest, kind)
        return _statistic(reshape(self, [product(shape(self))]), 0, False, rank)[0]


_register_median("median", _median_rank)
_register_median("nanmedian", _nanmedian_rank)


@converts(aten.kthvalue.default)
def kthvalue(self: Any, k: Any, dim: int = -1, keepdim: bool = False) -> Any:
    """The k-th smallest, counted from 1; NaN is the largest."""
    place = k - 1 if not isinstance(k, int) else tirx.const(k - 1, "int64")
    return _statistic(self, dim, keepdim, lambda *_: place)


# -- mode --------------------------------------------------------------------------------------


def _te_mode(values: Any, order: Any, axis: int) -> Any:
    """Per row the longest run of equals, the first of those as long, and its last index."""
    before, after = product(values.shape[:axis]), product(values.shape[axis + 1 :])
    length = values.shape[axis]
    sizes = [1 if d == axis else s for d, s in enumerate(values.shape)]

    def body(ins: Any, outs: Any) -> Any:
        with IRBuilder() as builder:
            data, indices = (Elements(b) for b in ins)
            mode, index = (Elements(b) for b in outs)
            with T.parallel(0, before * after) as row:
                start = row // after * length * after + row % after
                run = Elements(T.decl_buffer([1], "int64", scope="local"))
                best = Elements(T.decl_buffer([1], "int64", scope="local"))
                run[0] = best[0] = tirx.const(0, "int64")
                with T.serial(0, length) as k:
                    here = start + k * after
                    follows = data[here] == data[start + tirx.max(k - 1, 0) * after]
                    goes_on = tirx.all(k > 0, follows)
                    run[0] = tirx.Select(goes_on, run[0], tirx.const(0, "int64")) + 1
                    with T.If(run[0] > best[0]), T.Then():
                        best[0] = run[0]
                        mode[row] = data[here]
                        index[row] = indices[here]
            return builder.get()

    return te.extern(
        [sizes, sizes],
        [values, order],
        body,
        dtype=[values.dtype, "int64"],
        name="mode",
        tag="mode",
    )


@converts(aten.mode.default)
def mode(self: Any, dim: int = -1, keepdim: bool = False) -> Any:
    """The smallest of the most frequent elements, and where it stands last."""
    if ndim(self) == 0:
        return self, full([], 0, "int64")
    axis = normalize_axis(dim, ndim(self))
    left = [1 if i == axis else s for i, s in enumerate(shape(self)) if keepdim or i != axis]
    if any(s == 0 for s in left):
        return full(left, 0, dtype(self)), full(left, 0, "int64")
    kind = dtype(self)
    values, order = sorted_with_index(cast(self, "uint8") if kind == "bool" else self, axis, False)
    both = emit(
        te_call(lambda v, o: _te_mode(v, o, axis), values, order, primfunc_name_hint="mode")
    )
    found, index = (reshape(relax.TupleGetItem(both, i), left) for i in range(2))
    return cast(found, kind), index
