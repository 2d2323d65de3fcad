"""Convolutions, plain and transposed, as contractions that the CPU schedule computes in tiles.

The weight is a matrix of output channels by taps; the input's elements that a tap meets are the
columns, which the schedule copies tile by tile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax, te, tirx

from .contractions import CONTRACTION, GROUP, PLANE, WINDOW
from .flow import name_of
from .library import _SPACE, CONVOLUTIONS, _dtype, _sizes

_FLOATS = ("float32", "float64", "float16", "bfloat16")


@dataclass(frozen=True)
class Geometry:
    """A convolution's numbers, one per spatial axis; `before` and `after` pad the input."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool


def geometry(call: Any) -> Geometry | None:
    """The numbers of a convolution that can be a contraction; None for any other call."""
    known = CONVOLUTIONS.get(name_of(call))
    if known is None:
        return None
    axes, transposed = known
    attrs = call.attrs
    space = _SPACE[axes]
    layouts = (f"NC{space}", f"IO{space}" if transposed else f"OI{space}", f"NC{space}")
    given = (str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout))
    kinds = {_dtype(x) for x in call.args}
    sizes, kernel, result = _sizes(call.args[0]), _sizes(call.args[1]), _sizes(call)
    if given != layouts or len(kinds) != 1 or not kinds <= set(_FLOATS):
        return None
    if sizes is None or kernel is None or result is None:
        return None
    if not all(isinstance(s, tirx.IntImm) for s in kernel):
        return None
    every = [*sizes, *kernel, *result]
    if any(isinstance(s, tirx.IntImm) and int(s) == 0 for s in every):
        return None
    return Geometry(
        tuple(int(s) for s in kernel[2:]),
        tuple(int(s) for s in attrs.strides),
        tuple(int(p) for p in list(attrs.padding)[:axes]),
        tuple(int(p) for p in list(attrs.padding)[axes:]),
        tuple(int(d) for d in attrs.dilation),
        int(attrs.groups),
        transposed,
    )


def convolve(builder: Any, call: Any, numbers: Geometry, x: Any, weight: Any, dtype: str) -> Any:
    """The contraction of a convolution, summed in a dtype."""
    sizes = [int(s) for s in _sizes(call.args[1]) or []]
    if numbers.transposed:
        # (in, out of a group, taps) to (out, in of a group, taps).
        inner, outer = sizes[0] // numbers.groups, sizes[1]
        grouped = [numbers.groups, inner, outer, *numbers.kernel]
        weight = builder.emit(relax.op.reshape(weight, grouped))
        order = [0, 2, 1, *range(3, len(grouped))]
        weight = builder.emit(relax.op.permute_dims(weight, order))
        channels = outer * numbers.groups
    else:
        channels, inner = sizes[:2]
    taps = inner * math.prod(numbers.kernel)
    weight = builder.emit(relax.op.reshape(weight, [channels, taps]))

    def kernel(x: Any, weight: Any, sizes: Sequence[Any]) -> Any:
        return contraction(x, weight, sizes, numbers, dtype)

    return builder.call_te(
        kernel,
        x,
        weight,
        list(_sizes(call) or []),
        primfunc_name_hint="conv",
        primfunc_attrs={"op_pattern": 4},
    )


def contraction(x: Any, weight: Any, sizes: Sequence[Any], numbers: Geometry, dtype: str) -> Any:
    """A convolution of (batch, channels, ...) with a matrix (output channels, taps)."""
    taps = math.prod(numbers.kernel)
    group = int(weight.shape[0]) // numbers.groups
    inner = int(weight.shape[1]) // taps
    k = te.reduce_axis((0, weight.shape[1]), "k")
    zero = tirx.const(0, dtype)

    def element(n: Any, channel: Any, *at: Any) -> Any:
        places, inside = _source(k, at, list(x.shape[2:]), numbers)
        source = tirx.floordiv(k, taps) if taps > 1 else k
        if numbers.groups > 1:
            source = tirx.floordiv(channel, group) * inner + source
        value = _as(x(n, source, *places), dtype)
        if inside:
            value = tirx.if_then_else(tirx.all(*inside), value, zero)
        return te.sum(_as(weight(channel, k), dtype) * value, axis=k)

    marks: dict[str, Any] = {CONTRACTION: 1}
    if numbers.groups > 1:
        marks[GROUP] = group
    if not numbers.transposed:
        last = [
            numbers.kernel[-1],
            numbers.stride[-1],
            numbers.before[-1],
            numbers.dilation[-1],
        ]
        marks[WINDOW] = last
        if len(numbers.kernel) == 2:
            every = (numbers.kernel, numbers.stride, numbers.before, numbers.dilation)
            marks[PLANE] = [n for pair in every for n in pair]
    return te.compute(tuple(sizes), element, name="conv", attrs=marks)


def _source(
    k: Any, at: Sequence[Any], sizes: Sequence[Any], numbers: Geometry
) -> tuple[list[Any], list[Any]]:
    """Which element of the input a tap meets, and when there is one."""
    places, inside = [], []
    for axis, position in enumerate(at):
        after = math.prod(numbers.kernel[axis + 1 :])
        tap = tirx.floordiv(k, after) if after > 1 else k
        tap = tirx.floormod(tap, numbers.kernel[axis]) if numbers.kernel[axis] > 1 else 0
        stride, before, step = (
            numbers.stride[axis],
            numbers.before[axis],
            numbers.dilation[axis],
        )
        if numbers.transposed:
            offset = position + before - tap * step
            place = tirx.floordiv(offset, stride) if stride > 1 else offset
            if stride > 1:
                inside.append(tirx.floormod(offset, stride) == 0)
            inside += [place >= 0, place < sizes[axis]]
        else:
            place = position * stride + tap * step - before
            if before:
                inside.append(place >= 0)
            if before or numbers.after[axis]:
                inside.append(place < sizes[axis])
        places.append(place)
    return places, inside


def _as(value: Any, dtype: str) -> Any:
    return value if str(value.ty.dtype) == dtype else tirx.Cast(dtype, value)
