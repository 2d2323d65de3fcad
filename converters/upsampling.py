"""Resampling along each axis in turn, from a table of source positions and weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fx2relax.upsampling import resample, resample_backward

from .common import (
    Unsupported,
    cast,
    converts,
    dtype,
    emit,
    is_float,
    product,
    reshape,
    shape,
    te,
    te_call,
    tirx,
)
from .opaque import T, fill, is_large, loops, opaque, wide
from .resampling_tables import Axis, positions, table

# Vector code for the loop over what follows the axis.
_VECTOR = {"fx2relax.vector": 1}


def _axes(
    inputs: Sequence[Any], outputs: Sequence[Any], kind: str, align: bool, scales: Sequence[float]
) -> list[Axis]:
    return [Axis(i, o, kind, align, s) for i, o, s in zip(inputs, outputs, scales, strict=True)]


@converts(resample)
def upsample(x: Any, size: Sequence[Any], kind: str, align_corners: bool, scales: Any) -> Any:
    """Sums in float32 at least; uint8 in whole numbers of 15 bits, rounded after each axis."""
    own = dtype(x)
    bytes_too = len(size) == 2 or kind in ("nearest", "exact")
    if not is_float(x) and not (own == "uint8" and bytes_too):
        raise Unsupported(f"upsampling of {own}")
    if kind.endswith("_smooth") and own in ("float16", "bfloat16"):
        raise Unsupported(f"upsampling of {own} with smoothing")
    axes = _axes(shape(x)[2:], size, kind, align_corners, scales)
    if kind in ("nearest", "exact"):
        return te_call(_pick, x, *[positions(axis, own) for axis in axes])
    small = own == "uint8"
    result = emit(x if small or own == "float64" else cast(x, "float32"))
    # Columns before rows, as eager rounds uint8 between the two.
    for place in reversed(range(len(axes))):
        at, weights, bits = table(axes[place], own)
        arguments = [result, at, weights, *([bits] if small else [])]
        taps = axes[place].taps
        if small:
            result = emit(te_call(_sum_bytes, *arguments, place + 2))
        elif isinstance(taps, int) and taps <= 4 and not kind.endswith("_smooth"):
            result = emit(te_call(_sum_few, *arguments, place + 2, taps))
        else:
            result = emit(te_call(_sum, *arguments, place + 2))
    return cast(result, own)


def _pick(x: Any, *tables: Any) -> Any:
    """Each output element is one of the input."""
    sizes = [*x.shape[:2], *[t.shape[0] for t in tables]]

    def element(*index: Any) -> Any:
        at = [t(i) for t, i in zip(tables, index[2:], strict=True)]
        return x(*index[:2], *at)

    return te.compute(sizes, element, name="resample_nearest")


def _sizes(x: Any, at: Any, axis: int) -> list[Any]:
    return [at.shape[0] if k == axis else s for k, s in enumerate(x.shape)]


def _tap(x: Any, at: Any, index: Sequence[Any], axis: int, tap: Any) -> Any:
    source = [at(index[axis], tap) if k == axis else i for k, i in enumerate(index)]
    return x(*source)


def _sum_few(x: Any, at: Any, weights: Any, axis: int, taps: int) -> Any:
    """Few taps, each with a position, written out, so that the kernel fuses with others."""

    def element(*index: Any) -> Any:
        terms = [
            _tap(x, at, index, axis, wide(k)) * weights(index[axis], wide(k)) for k in range(taps)
        ]
        return sum(terms[1:], terms[0])

    return te.compute(_sizes(x, at, axis), element, name="resample")


def _sum(x: Any, at: Any, weights: Any, axis: int) -> Any:
    """Any number of taps; a position of -1 is none."""
    k = te.reduce_axis((0, at.shape[1]), name="tap")

    def element(*index: Any) -> Any:
        value = _tap(x, at, index, axis, k) * weights(index[axis], k)
        zero = tirx.const(0, str(x.dtype))
        return te.sum(tirx.if_then_else(at(index[axis], k) < 0, zero, value), axis=[k])

    return te.compute(_sizes(x, at, axis), element, name="resample_smooth")


def _sum_bytes(x: Any, at: Any, weights: Any, bits: Any, axis: int) -> Any:
    """Fixed-point weights; the sum is rounded, shifted back and clamped to a byte."""
    k = te.reduce_axis((0, at.shape[1]), name="tap")

    def term(*index: Any) -> Any:
        value = tirx.Cast("int32", _tap(x, at, index, axis, k)) * weights(index[axis], k)
        zero = tirx.const(0, "int32")
        return te.sum(tirx.if_then_else(at(index[axis], k) < 0, zero, value), axis=[k])

    sums = te.compute(_sizes(x, at, axis), term, name="resample_bytes")

    def rounded(*index: Any) -> Any:
        half = tirx.const(1, "int32") << (bits(wide(0)) - 1)
        value = (sums(*index) + half) >> bits(wide(0))
        low, high = tirx.const(0, "int32"), tirx.const(255, "int32")
        return tirx.Cast("uint8", tirx.min(tirx.max(value, low), high))

    return te.compute(sums.shape, rounded, name="byte")


@converts(resample_backward)
def upsample_backward(
    grad: Any, input_size: Sequence[Any], kind: str, align_corners: bool, scales: Any
) -> Any:
    """Each gradient goes back to its sources with their weights, axis by axis."""
    own = dtype(grad)
    axes = _axes(input_size, shape(grad)[2:], kind, align_corners, scales)
    result = emit(grad if own == "float64" else cast(grad, "float32"))
    for place, axis in enumerate(axes):
        at: Any
        if kind in ("nearest", "exact"):
            at, weights = positions(axis, own), None
        else:
            at, weights, _ = table(axis, own)
        result = emit(_spread(result, at, weights, place + 2, axis))
    return cast(result, own)


def _spread(grad: Any, at: Any, weights: Any, place: int, axis: Axis) -> Any:
    kind, sizes = dtype(grad), shape(grad)
    before, after = product(sizes[:place]), product(sizes[place + 1 :])
    taps = 1 if weights is None else axis.taps
    parallel = 0 if is_large(product(sizes)) else None

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        lead, inputs, outputs, tail, count = numbers
        source, index, out = ins[0], ins[1], outs[0]
        fill(out, lead * inputs * tail, lambda _: tirx.const(0, kind))
        with (
            loops([lead, outputs, count], parallel) as (n, o, k),
            T.If(index[o * count + k] >= wide(0)),
            T.Then(),
        ):
            row = (n * inputs + index[o * count + k]) * tail
            with T.serial(wide(0), wide(tail), annotations=_VECTOR) as t:
                value = source[(n * outputs + o) * tail + t]
                if weights is not None:
                    value = value * ins[2][o * count + k]
                out[row + t] = out[row + t] + value

    inputs = [grad, at, *([] if weights is None else [weights])]
    numbers = [before, axis.inputs, axis.outputs, after, taps]
    flat = opaque(
        "resample_backward", body, inputs, lambda n: [(n[0] * n[1] * n[3], kind)], numbers
    )
    return reshape(flat, [*sizes[:place], axis.inputs, *sizes[place + 1 :]])
