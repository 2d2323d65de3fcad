"""Writing elements at indices: the kernels, and `scatter` with its reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .common import (
    Refused,
    cast,
    converts,
    dtype,
    ndim,
    normalize_axis,
    product,
    relax,
    reshape,
    shape,
    tirx,
)
from .indices import checked, offset, strides_of
from .opaque import copy, fill, is_large, loops, opaque, wide

aten = torch.ops.aten

# Called with where an element is written and what is written there.
Action = Callable[[Any, Any], None]
# Called with buffers, sizes and an action: loops over what is written, in order.
Visit = Callable[[Any, Sequence[Any], Action], None]

_NAMES = {"add": "sum", "multiply": "prod"}


def combined(how: str | None, old: Any, new: Any, kind: str) -> Any:
    """What an element becomes: replaced for None; NaN wins a maximum or minimum."""
    if how is None:
        return new
    if kind == "bool":
        return (tirx.Or if how in ("sum", "amax", "mean") else tirx.And)(old, new)
    if how in ("sum", "mean"):
        return old + new
    if how == "prod":
        return old * new
    better = new > old if how == "amax" else new < old
    if "float" in kind:
        better = tirx.And(tirx.Or(better, _is_nan(new, kind)), tirx.Not(_is_nan(old, kind)))
    return tirx.Select(better, new, old)


def _is_nan(x: Any, kind: str) -> Any:
    return tirx.isnan(tirx.Cast("float32", x) if kind in ("float16", "bfloat16") else x)


def identity(how: str, kind: str) -> Any:
    """The value that a reduction starts from."""
    if how in ("sum", "mean"):
        return tirx.const(0, kind)
    if how == "prod":
        return tirx.const(1, kind)
    if kind == "bool":
        return tirx.const(how == "amin", kind)
    if "float" in kind:
        return tirx.const(float("-inf" if how == "amax" else "inf"), kind)
    return tirx.min_value(kind) if how == "amax" else tirx.max_value(kind)


def written(
    name: str,
    into: Any,
    inputs: Sequence[Any],
    numbers: Sequence[Any],
    visit: Visit,
    how: str | None = None,
    include_self: bool = True,
) -> Any:
    """A tensor with elements replaced by, or combined with, what `visit` gives, in its order.

    Args:
        name: the kernel's name.
        into: the tensor.
        inputs: what else `visit` reads; it is given these alone.
        numbers: sizes that `visit` uses.
        visit: see `Visit`.
        how: None, "sum", "prod", "mean", "amax" or "amin".
        include_self: whether the tensor's own elements take part in the reduction.
    """
    kind, count = dtype(into), product(shape(into))
    mean = how == "mean"

    def body(ins: Any, outs: Any, sizes: list[Any]) -> None:
        total, rest = sizes[0], sizes[1:]
        old, out = ins[0], outs[0]
        copy(out, total, old)
        if mean:
            fill(outs[1], total, lambda _: wide(int(include_self)))

        def start(at: Any, _: Any) -> None:
            out[at] = identity(how or "", kind)

        def write(at: Any, new: Any) -> None:
            out[at] = combined(how, out[at], new, kind)
            if mean:
                outs[1][at] = outs[1][at] + wide(1)

        if how is not None and not include_self:
            visit(ins[1:], rest, start)
        visit(ins[1:], rest, write)
        if mean:
            fill(out, total, lambda i: _divided(out[i], outs[1][i], kind))

    def outputs(sizes: list[Any]) -> list[tuple[Any, str]]:
        return [(sizes[0], kind), (sizes[0], "int64")][: 1 + mean]

    result = opaque(name, body, [into, *inputs], outputs, [count, *numbers], changes=not mean)
    return reshape(relax.TupleGetItem(result, 0) if mean else result, shape(into))


def _divided(total: Any, count: Any, kind: str) -> Any:
    count = tirx.max(count, wide(1))
    if kind == "bool":
        return total
    if "float" in kind:
        return total / tirx.Cast(kind, count)
    return tirx.floordiv(total, tirx.Cast(kind, count))


def _empty(x: Any) -> bool:
    return any(isinstance(s, int) and s == 0 for s in shape(x))


def scattered(
    self: Any, dim: int, index: Any, src: Any, how: str | None = None, include_self: bool = True
) -> Any:
    """`scatter_reduce`; `src` may be a 0-d tensor."""
    if _empty(index):
        return self
    if ndim(self) == 0:
        spread = src if ndim(src) == 0 else reshape(src, [1])
        return reshape(
            scattered(reshape(self, [1]), 0, reshape(index, [1]), spread, how, include_self), []
        )
    if ndim(index) == 0:
        index = reshape(index, [1])
    rank = ndim(self)
    axis = normalize_axis(dim, rank)
    if shape(self)[axis] == 0:
        raise Refused("an axis without elements to write to")
    at = checked([index], [shape(self)[axis]], wrap=False, kind="RuntimeError")
    single = ndim(src) == 0
    extents = shape(index)
    parallel = 0 if axis > 0 and is_large(product(extents)) else None

    def visit(ins: Any, numbers: Sequence[Any], action: Action) -> None:
        full, counts = list(numbers[:rank]), list(numbers[rank : 2 * rank])
        sources = list(numbers[2 * rank :])
        with loops(counts, parallel=parallel) as i:
            target = list(i)
            target[axis] = ins[0][offset(i, strides_of(counts))]
            read = wide(0) if single else offset(i, strides_of(sources))
            action(offset(target, strides_of(full)), ins[1][read])

    numbers = [*shape(self), *extents, *([] if single else shape(src))]
    return written("scatter", self, [at, src], numbers, visit, how, include_self)


@converts(aten.scatter.src)
def scatter(self: Any, dim: int, index: Any, src: Any) -> Any:
    """Elements replaced; of several for one place the last stays."""
    return scattered(self, dim, index, src)


@converts(aten.scatter_add.default)
def scatter_add(self: Any, dim: int, index: Any, src: Any) -> Any:
    """Elements added to; several for one place add up."""
    return scattered(self, dim, index, src, "sum")


@converts(aten.scatter.value)
def scatter_value(self: Any, dim: int, index: Any, value: Any) -> Any:
    """Elements replaced by one number."""
    return scattered(self, dim, index, cast(value, dtype(self)))


@converts(aten.scatter.reduce)
def scatter_with(self: Any, dim: int, index: Any, src: Any, *, reduce: str) -> Any:
    """Elements added to or multiplied."""
    return scattered(self, dim, index, src, _NAMES[reduce])


@converts(aten.scatter.value_reduce)
def scatter_value_with(self: Any, dim: int, index: Any, value: Any, *, reduce: str) -> Any:
    """Elements added to, or multiplied by, one number."""
    return scattered(self, dim, index, cast(value, dtype(self)), _NAMES[reduce])


@converts(aten.scatter_reduce.two)
def scatter_reduce(
    self: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True
) -> Any:
    """Elements combined; integer means are rounded down, and NaN wins a maximum or minimum."""
    return scattered(self, dim, index, src, reduce, include_self)
