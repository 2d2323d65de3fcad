"""Padding with a constant, by reflection and by replication, and the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .common import compute_dtype, converts, dtype, is_float, ndim, op, shape, te, te_call, tirx
from .opaque import wide

aten = torch.ops.aten


def _sides(padding: Sequence[Any], rank: int) -> list[tuple[Any, Any]]:
    """PyTorch's list, last axis first, as (before, after) of each axis in order."""
    pairs = [(padding[i], padding[i + 1]) for i in range(0, len(padding), 2)]
    return [(0, 0)] * (rank - len(pairs)) + pairs[::-1]


@converts(aten.constant_pad_nd.default)
def constant_pad_nd(self: Any, pad: Sequence[Any], value: Any = 0) -> Any:
    """A border of one value; a negative width crops."""
    sides = _sides(pad, ndim(self))
    static = all(isinstance(n, int) for side in sides for n in side)
    if static and all(n == 0 for side in sides for n in side):
        return self
    if static and all(n >= 0 for side in sides for n in side) and _exact(self, value):
        widths = [n for side in sides for n in side]
        return op.nn.pad(self, widths, "constant", float(value))
    kind, filler = dtype(self), scalar_value(value, dtype(self))
    sizes = shape(self)
    full = [wide(s + a + b) for s, (a, b) in zip(sizes, sides, strict=True)]

    def kernel(x: Any, extents: Any, before: Any) -> Any:
        def element(*i: Any) -> Any:
            at = [v - b for v, b in zip(i, before, strict=True)]
            inside = [tirx.And(v >= 0, v < n) for v, n in zip(at, x.shape, strict=True)]
            held = inside[0]
            for condition in inside[1:]:
                held = tirx.And(held, condition)
            return tirx.if_then_else(held, x(*at), tirx.const(filler, kind))

        return te.compute(list(extents), element, name="pad")

    return te_call(kernel, self, full, [wide(a) for a, _ in sides])


def _exact(x: Any, value: Any) -> bool:
    """Whether TVM's pad, which takes a float, keeps the value."""
    return is_float(x) or (dtype(x) != "bool" and abs(value) < 2**24)


def scalar_value(value: Any, kind: str) -> Any:
    """A Python number converted as PyTorch converts it to a dtype."""
    from fx2relax import dtypes

    return torch.tensor(value).to(dtypes.to_torch(kind)).item()


# From a coordinate of the padded axis, less the width in front, and the axis's size, to the
# coordinate it shows.
Map = Callable[[Any, Any], Any]


def _reflected(v: Any, size: Any) -> Any:
    last = size - 1
    return last - tirx.abs(last - tirx.abs(v))


def _nearest(v: Any, size: Any) -> Any:
    return tirx.max(tirx.min(v, size - 1), wide(0))


def _border(name: str, show: Map, x: Any, padding: Sequence[Any]) -> Any:
    sides = _sides(padding, ndim(x))
    full = [wide(s + a + b) for s, (a, b) in zip(shape(x), sides, strict=True)]
    touched = [not (isinstance(a, int) and isinstance(b, int) and a == b == 0) for a, b in sides]

    def kernel(t: Any, extents: Any, before: Any) -> Any:
        def element(*i: Any) -> Any:
            return t(
                *[
                    show(v - b, n) if here else v
                    for v, b, n, here in zip(i, before, t.shape, touched, strict=True)
                ]
            )

        return te.compute(list(extents), element, name=name)

    return te_call(kernel, x, full, [wide(a) for a, _ in sides])


def _register(name: str, show: Map, dims: int) -> None:
    def pad(self: Any, padding: Sequence[Any]) -> Any:
        return _border(name, show, self, padding)

    converts(getattr(aten, f"{name}{dims}d").default)(pad)


for _dims in (1, 2, 3):
    _register("reflection_pad", _reflected, _dims)
    _register("replication_pad", _nearest, _dims)


# From a coordinate of the axis, its size, the width in front and the number of the term to the
# coordinate of the padded axis whose gradient is added, and the condition for it.
Terms = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


def _reflected_terms(i: Any, size: Any, before: Any, k: Any) -> tuple[Any, Any]:
    at = tirx.Select(
        k.equal(wide(0)),
        i + before,
        tirx.Select(k.equal(wide(1)), before - i, before + 2 * (size - 1) - i),
    )
    left = tirx.And(k.equal(wide(1)), i >= 1)
    right = tirx.And(k.equal(wide(2)), i < size - 1)
    return at, tirx.Or(k.equal(wide(0)), tirx.Or(left, right))


def _nearest_terms(i: Any, size: Any, before: Any, k: Any) -> tuple[Any, Any]:
    # Even terms lie in front of the axis, odd ones behind it; term 0 is the element itself.
    step = tirx.floordiv(k + 1, wide(2))
    odd = tirx.floormod(k, wide(2)).equal(wide(1))
    first = k.equal(wide(0))
    at = tirx.Select(first, i + before, tirx.Select(odd, before + size - 1 + step, before - step))
    edge = tirx.Or(tirx.And(odd, i.equal(size - 1)), tirx.And(tirx.Not(odd), i.equal(wide(0))))
    return at, tirx.Or(first, edge)


def _gathered(name: str, terms: Terms, grad: Any, axis: int, size: Any, before: Any, n: Any) -> Any:
    """The gradient along one axis: for each element the sum over the places that show it."""
    kind = dtype(grad)
    wider = compute_dtype(kind)
    full = shape(grad)
    full[axis] = size

    def kernel(g: Any, extents: Any, width: Any, count: Any) -> Any:
        k = te.reduce_axis((wide(0), count), name="k")

        def element(*i: Any) -> Any:
            at, held = terms(i[axis], extents[axis], width, k)
            held = tirx.And(held, tirx.And(at >= 0, at < g.shape[axis]))
            value = g(*[at if a == axis else v for a, v in enumerate(i)])
            value = tirx.if_then_else(held, value, tirx.const(0, kind))
            return te.sum(tirx.Cast(wider, value) if wider != kind else value, axis=[k])

        total = te.compute(list(extents), element, name=name)
        if wider == kind:
            return total
        return te.compute(list(extents), lambda *i: tirx.Cast(kind, total(*i)), name="narrow")

    return te_call(kernel, grad, [wide(s) for s in full], wide(before), wide(n))


def _register_backward(name: str, terms: Terms, dims: int) -> None:
    def backward(grad_output: Any, self: Any, padding: Sequence[Any]) -> Any:
        grad = grad_output
        for axis, (before, after) in enumerate(_sides(padding, ndim(self))):
            if isinstance(before, int) and isinstance(after, int):
                if before == after == 0:
                    continue
                count: Any = 3 if name == "reflection_pad" else 1 + 2 * max(before, after, 0)
            else:
                count = 3 if name == "reflection_pad" else 1 + 2 * tirx.max(before, after)
            size = shape(self)[axis]
            grad = _gathered(f"{name}_backward", terms, grad, axis, size, before, count)
        return grad

    converts(getattr(aten, f"{name}{dims}d_backward").default)(backward)


for _dims in (1, 2, 3):
    _register_backward("reflection_pad", _reflected_terms, _dims)
    _register_backward("replication_pad", _nearest_terms, _dims)
