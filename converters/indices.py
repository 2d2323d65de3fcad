"""Indices that a user gave: wrapped, checked as eager checks them, joined into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fx2relax.bounds import equal

from .common import dtype, op, product, reshape, shape, shape_expr, te_call, tirx, topi
from .opaque import is_large, local, loops, opaque, require, wide

__all__ = [
    "INJECTIVE",
    "broadcast_sizes",
    "checked",
    "in_range",
    "is_one",
    "offset",
    "spread",
    "strides_of",
    "take_along",
]


#: TVM takes a place that is read for one that nothing can be fused with; it can.
INJECTIVE = {"op_pattern": 2}
# Pieces of an index, for threads to share.
_PARTS = 16


def is_one(size: Any) -> bool:
    """Whether a size is known to be 1."""
    return isinstance(size, int) and size == 1


def strides_of(sizes: Sequence[Any]) -> list[Any]:
    """The strides of a compact tensor, in elements; 0 on axes of size 1."""
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(sizes):
        strides.insert(0, 0 if is_one(size) else step)
        step = step * size
    return strides


def offset(at: Sequence[Any], strides: Sequence[Any]) -> Any:
    """Where the element at some coordinates lies in a flat tensor."""
    total: Any = wide(0)
    for coordinate, stride in zip(at, strides, strict=True):
        if not (isinstance(stride, int) and stride == 0):
            total = total + coordinate * stride
    return total


def broadcast_sizes(shapes: Sequence[Sequence[Any]]) -> list[Any]:
    """The shape that shapes broadcast to.

    Raises ValueError for those that do not; PyTorch has checked it, but not for indices.
    """
    rank = max((len(s) for s in shapes), default=0)
    result: list[Any] = [1] * rank
    for sizes in shapes:
        for axis, size in enumerate(sizes, rank - len(sizes)):
            known = isinstance(result[axis], int) and not is_one(result[axis])
            if not is_one(size) and not known:
                result[axis] = size
            elif known and isinstance(size, int) and size not in (1, result[axis]):
                raise ValueError(f"sizes {shapes} do not broadcast")
    return result


def spread(x: Any, sizes: Sequence[Any], message: str, kind: str) -> Any:
    """A tensor broadcast to a shape, where only the data may tell whether a size of it is 1.

    Raises, when run, an exception of `kind` where such a size is neither 1 nor the shape's;
    ValueError at once where that is plain.
    """
    own = [*[1] * (len(sizes) - len(shape(x))), *shape(x)]
    pairs = list(zip(own, sizes, strict=True))
    fits = [is_one(o) or equal(o, s) for o, s in pairs]
    if any(isinstance(o, int) and isinstance(s, int) and o not in (1, s) for o, s in pairs):
        raise ValueError(message)
    if all(equal(o, s) for o, s in pairs) and len(shape(x)) == len(own):
        return x
    if all(fits):
        return op.broadcast_to(x, shape_expr(sizes))
    rank, element = len(sizes), dtype(x)

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        full, held = [wide(n) for n in numbers[:rank]], [wide(n) for n in numbers[rank:]]
        single = [size.equal(wide(1)) for size in held]
        for fit, one, size, extent in zip(fits, single, held, full, strict=True):
            if not fit:
                require(tirx.Or(one, size.equal(extent)), message, kind)
        with loops(full) as at:
            place = [tirx.Select(one, wide(0), i) for one, i in zip(single, at, strict=True)]
            steps = [product(held[axis + 1 :]) for axis in range(rank)]
            outs[0][offset(at, strides_of(full))] = ins[0][offset(place, steps)]

    def outputs(numbers: list[Any]) -> list[tuple[Any, str]]:
        return [(product(numbers[:rank]), element)]

    return reshape(opaque("spread", body, [x], outputs, [*sizes, *own]), sizes)


def checked(
    indices: Sequence[Any],
    sizes: Sequence[Any],
    *,
    wrap: bool = True,
    check: bool = True,
    message: str = "",
    kind: str = "IndexError",
) -> Any:
    """Broadcast indices into axes of some sizes, as one int64 index into those axes joined.

    Raises, when run, an exception of `kind` for an index out of range; with `wrap` a negative
    index counts from the end.
    """
    result = broadcast_sizes([shape(i) for i in indices])
    ones = [[is_one(s) for s in shape(i)] for i in indices]
    count = len(indices)

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        limits, extents = [wide(n) for n in numbers[:count]], numbers[count:]
        bad = local("int64", count)
        for k in range(count):
            bad[k] = wide(0)
        with loops(extents) as at:
            joined: Any = wide(0)
            for k, (index, limit) in enumerate(zip(ins, limits, strict=True)):
                own = len(extents) - len(ones[k])
                held = [1 if one else e for one, e in zip(ones[k], extents[own:], strict=True)]
                value = wide(index[offset(at[own:], strides_of(held))])
                low = -limit if wrap else wide(0)
                if check:
                    bad[k] += tirx.Cast("int64", tirx.Or(value < low, value >= limit))
                if wrap:
                    value = value + tirx.Select(value < wide(0), limit, wide(0))
                joined = value if k == 0 else joined * limit + value
            outs[0][offset(at, strides_of(extents))] = joined
        if check:
            for k, limit in enumerate(limits):
                require(bad[k].equal(wide(0)), message or _out_of(limit), kind)

    flat = opaque(
        "check_index",
        body,
        indices,
        lambda numbers: [(product(numbers[count:]), "int64")],
        [*sizes, *result],
    )
    return reshape(flat, result)


def in_range(index: Any, size: Any, *, message: str = "", kind: str = "IndexError") -> Any:
    """A zero, int64 of one element, that there is once an index is known to lie in an axis.

    It costs less than `checked`, as nothing is written: who reads at the index adds the zero to it.
    Raises, when run, an exception of `kind` for an index that is negative or out of range.
    """
    count = product(shape(index))

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        limit, total = (wide(n) for n in numbers)
        parts = _PARTS if is_large(count) else 1
        each = tirx.floordiv(total + (parts - 1), wide(parts))
        bad = local("int64", parts)
        with loops([parts], parallel=0 if parts > 1 else None) as (part,):
            found = local("int64")
            found[0] = wide(0)
            rest = tirx.max(tirx.min(each, total - part * each), wide(0))
            with loops([rest]) as (i,):
                value = wide(ins[0][part * each + i])
                outside = tirx.Or(value < wide(0), value >= limit)
                found[0] += tirx.Cast("int64", outside)
            bad[part] = found[0]
        outs[0][0] = wide(0)
        for part in range(parts):
            require(bad[part].equal(wide(0)), message or _out_of(limit), kind)

    numbers = [size, count]
    return opaque("check_range", body, [index], lambda _: [(1, "int64")], numbers)


def _out_of(limit: Any) -> str:
    known = isinstance(limit, tirx.IntImm)
    size = f"a dimension of size {limit.value}" if known else "its dimension"
    return f"index is out of bounds for {size}"


def take_along(x: Any, index: Any, axis: int) -> Any:
    """``x[..., index, ...]`` along an axis; the index has been checked."""
    # "clip" costs nothing that can be measured; "fast" makes TVM print a warning.
    return te_call(topi.take, x, index, axis, mode="clip", primfunc_attrs=INJECTIVE)
