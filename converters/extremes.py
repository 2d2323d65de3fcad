"""Largest and smallest elements, and where they are; NaN is larger and smaller than all else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .common import (
    Refused,
    cast,
    converts,
    dtype,
    emit,
    is_float,
    ndim,
    op,
    product,
    reshape,
    shape,
    te,
    te_call,
    tirx,
    topi,
)
from .reductions import axes, full, reduced_shape

aten = torch.ops.aten


def _reduce(
    x: Any, dims: Sequence[int], keepdim: bool, body: Callable[[list[Any], list[Any]], Any]
) -> Any:
    """A TE reduction: `body` gets the element's indices and the reduce axes."""
    loops = {d: te.reduce_axis((0, x.shape[d]), name=f"k{d}") for d in dims}
    sizes = [1 if d in loops else s for d, s in enumerate(x.shape) if keepdim or d not in loops]

    def element(*indices: Any) -> Any:
        left = iter(indices)
        full_index = []
        for d in range(len(x.shape)):
            if d in loops:
                full_index.append(loops[d])
                if keepdim:
                    next(left)
            else:
                full_index.append(next(left))
        return body(full_index, list(loops.values()))

    return te.compute(sizes, element, name="extreme")


def _infinity(kind: str, sign: int) -> Any:
    """What no element is beyond: an infinity, or the dtype's last integer."""
    if "float" in kind:
        infinity = tirx.infinity(kind)
        return infinity if sign > 0 else -infinity
    return tirx.max_value(kind) if sign > 0 else tirx.min_value(kind)


def _beats(a: Any, b: Any, largest: bool, kind: str) -> Any:
    """Whether `a` comes before `b`: strictly beyond it, or NaN."""
    wins = a > b if largest else a < b
    return tirx.any(wins, tirx.isnan(a)) if "float" in kind else wins


def te_reducer(kind: str, largest: bool = True) -> Any:
    """The largest or smallest of a dtype as a TE reduction; NaN wins."""
    return te.comm_reducer(
        lambda a, b: tirx.Select(_beats(a, b, largest, kind), a, b),
        lambda _: _infinity(kind, -1 if largest else 1),
        name="largest" if largest else "smallest",
    )


def _read(x: Any, index: Sequence[Any]) -> Any:
    """An element, half precision as float32."""
    value = x(*index)
    return tirx.Cast("float32", value) if str(x.dtype) in ("float16", "bfloat16") else value


def _te_extreme(x: Any, dims: Sequence[int], keepdim: bool, largest: bool) -> Any:
    kind = "float32" if str(x.dtype) in ("float16", "bfloat16") else str(x.dtype)
    reducer = te_reducer(kind, largest)
    return _reduce(x, dims, keepdim, lambda index, loops: reducer(_read(x, index), axis=loops))


def _te_index(x: Any, best: Any, axis: int, keepdim: bool) -> Any:
    """Where the first element is that equals `best`, or the first NaN."""
    length = x.shape[axis]
    short = isinstance(length, tirx.IntImm) and int(length) < 2**31 - 1
    kind = "int32" if short else "int64"

    def place(index: list[Any], loops: list[Any]) -> Any:
        value = _read(x, index)
        kept = [0 if d == axis else i for d, i in enumerate(index)]
        if not keepdim:
            del kept[axis]
        other = _read(best, kept)
        found = value.equal(other)
        if "float" in str(value.ty.dtype):
            found = tirx.any(found, tirx.isnan(value))
        here = tirx.Cast(kind, index[axis])
        return te.min(tirx.Select(found, here, tirx.max_value(kind)), axis=loops)

    place_of = _reduce(x, [axis], keepdim, place)
    return topi.cast(place_of, "int64") if short else place_of


def _refuse_nothing(x: Any, dims: Sequence[int]) -> None:
    if any(s == 0 for s in (shape(x)[d] for d in dims)):
        raise Refused("an axis without elements, which has no largest and no smallest")


def extreme(x: Any, dims: Sequence[int], keepdim: bool, largest: bool) -> Any:
    """The largest or smallest element over axes."""
    kind = dtype(x)
    _refuse_nothing(x, dims)
    if not dims:
        return x
    if any(s == 0 for s in reduced_shape(x, dims, keepdim)):
        return full(reduced_shape(x, dims, keepdim), 0, kind)
    if kind == "bool":
        return cast(extreme(emit(cast(x, "uint8")), dims, keepdim, largest), "bool")
    if not is_float(x):
        return (op.max if largest else op.min)(x, list(dims), keepdims=keepdim)
    return cast(te_call(_te_extreme, x, list(dims), keepdim, largest), kind)


def extreme_with_index(x: Any, dim: int, keepdim: bool, largest: bool) -> tuple[Any, Any]:
    """The largest or smallest element over one axis, and the index of the first such."""
    kind = dtype(x)
    dims = axes(x, [dim])
    _refuse_nothing(x, dims)
    if not dims:
        return x, full([], 0, "int64")
    sizes = reduced_shape(x, dims, keepdim)
    if any(s == 0 for s in sizes):
        return full(sizes, 0, kind), full(sizes, 0, "int64")
    source = emit(cast(x, "uint8")) if kind == "bool" else emit(x)
    best = emit(extreme(source, dims, keepdim, largest))
    return cast(best, kind), te_call(_te_index, source, best, dims[0], keepdim)


def _register(name: str, largest: bool) -> None:
    @converts(getattr(aten, f"a{name}").default)
    def over_axes(self: Any, dim: Any = (), keepdim: bool = False) -> Any:
        """An empty list of axes means all; NaN wins."""
        return extreme(self, axes(self, dim), keepdim, largest)

    @converts(getattr(aten, name).default)
    def of_all(self: Any) -> Any:
        return extreme(self, axes(self, None), False, largest)

    @converts(getattr(aten, name).dim)
    def over_axis(self: Any, dim: int, keepdim: bool = False) -> Any:
        """The first of equals, the first NaN."""
        return extreme_with_index(self, dim, keepdim, largest)

    @converts(getattr(aten, f"arg{name}").default)
    def index(self: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        """Without an axis the index in the flattened tensor; NaN wins, the first of equals."""
        if dim is not None:
            return extreme_with_index(self, dim, keepdim, largest)[1]
        flat = reshape(self, [product(shape(self))])
        found = extreme_with_index(flat, 0, False, largest)[1]
        return reshape(found, [1] * ndim(self)) if keepdim else found


_register("max", largest=True)
_register("min", largest=False)
