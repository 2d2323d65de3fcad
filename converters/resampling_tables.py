"""Where each output position of a resampled axis comes from, and with which weights.

The arithmetic follows eager's to the rounding: a position that falls on the other side of a whole
number is another element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from .common import emit, op, relax, reshape, tirx
from .opaque import T, local, loops, opaque, wide

# How many input elements one output element takes where nothing is smoothed.
_TAPS = {"linear": 2, "cubic": 4}
_MOST_BITS = 22


@dataclass(frozen=True)
class Axis:
    """One resampled axis; a scale of 0 is that of the sizes."""

    inputs: Any
    outputs: Any
    kind: str
    align_corners: bool
    given: float

    @property
    def base(self) -> str:
        return self.kind.removesuffix("_smooth")

    @property
    def smooth(self) -> bool:
        return self.kind.endswith("_smooth")

    @property
    def taps(self) -> Any:
        """How many input elements one output element takes at most."""
        if not self.smooth:
            return _TAPS[self.base]
        half = _TAPS[self.base] // 2
        if self.given > 0 and not self.align_corners:
            return math.ceil(half * max(1 / self.given, 1)) * 2 + 1
        apart = (self.inputs - 1, self.outputs - 1)
        inputs, outputs = apart if self.align_corners else (self.inputs, self.outputs)
        if isinstance(inputs, int) and isinstance(outputs, int):
            return max(-(-half * inputs // max(outputs, 1)), half) * 2 + 1
        outputs = tirx.max(wide(outputs), wide(1))
        reach = tirx.floordiv(wide(half) * wide(inputs) + outputs - 1, outputs)
        return tirx.max(reach, wide(half)) * 2 + 1

    def scale(self, inputs: Any, outputs: Any, kind: str) -> Any:
        """How far apart in the input two neighbours of the output are."""
        if self.align_corners:
            apart = tirx.Cast(kind, inputs - 1) / tirx.Cast(kind, tirx.max(outputs - 1, wide(1)))
            return tirx.Select(outputs > 1, apart, tirx.const(0, kind))
        if self.given > 0:
            width = torch.float64 if kind == "float64" else torch.float32
            return tirx.const(torch.tensor(1 / self.given, dtype=width).item(), kind)
        return tirx.Cast(kind, inputs) / tirx.Cast(kind, outputs)


def positions(axis: Axis, own: str) -> Any:
    """The one input position of each output position, of tensors of a dtype."""
    kind = "float64" if own == "float64" else "float32"

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        inputs, outputs = [wide(n) for n in numbers]
        scale = axis.scale(inputs, outputs, kind)
        with loops([outputs]) as (o,):
            place = tirx.Cast(kind, o)
            if axis.kind == "exact":
                place = place + tirx.const(0.5, kind)
            # Even in float64 the product is rounded down as a float32.
            down = tirx.floor(tirx.Cast("float32", place * scale))
            outs[0][o] = tirx.min(tirx.Cast("int64", down), inputs - 1)

    numbers = [axis.inputs, axis.outputs]
    return emit(opaque("resample_positions", body, [], lambda n: [(n[1], "int64")], numbers))


def table(axis: Axis, own: str) -> tuple[Any, Any, Any]:
    """Positions and weights, both (outputs, taps); for uint8 whole weights and their bits.

    A position of -1 is no tap.
    """
    small = own == "uint8"
    kind = "float64" if own in ("float64", "uint8") else "float32"

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        inputs, outputs, taps = [wide(n) for n in numbers]
        at, weights = outs[:2]
        scale = axis.scale(inputs, outputs, kind)
        with loops([outputs]) as (o,):
            start = _smooth if axis.smooth else _sharp
            start(axis, kind, o, o * taps, scale, inputs, outputs, taps, at, weights)
        if small:
            _whole(outputs * taps, weights, outs[2], outs[3])

    def results(numbers: list[Any]) -> list[tuple[Any, str]]:
        count = numbers[1] * numbers[2]
        found = [(count, "int64"), (count, kind)]
        return [*found, (count, "int32"), (1, "int32")] if small else found

    numbers = [axis.inputs, axis.outputs, axis.taps]
    found = emit(opaque("resample_table", body, [], results, numbers))
    at, weights = (
        emit(reshape(relax.TupleGetItem(found, k), numbers[1:])) for k in (0, 2 if small else 1)
    )
    return at, weights, emit(relax.TupleGetItem(found, 3)) if small else op.zeros((1,), "int32")


def _sharp(
    axis: Axis,
    kind: str,
    o: Any,
    row: Any,
    scale: Any,
    inputs: Any,
    outputs: Any,
    taps: Any,
    at: Any,
    weights: Any,
) -> None:
    """As many taps as the filter is wide; those beyond an end fall on the end."""
    cubic = axis.base == "cubic"
    half, zero, one = (tirx.const(v, kind) for v in (0.5, 0, 1))
    real, share = local(kind), local(kind)
    place = tirx.Cast(kind, o)
    if axis.align_corners:
        real[0] = scale * place
    else:
        real[0] = scale * (place + half) - half
        if not cubic:
            real[0] = tirx.max(real[0], zero)
    whole = local("int64", 2)
    whole[0] = tirx.min(tirx.Cast("int64", tirx.floor(real[0])), inputs - 1)
    share[0] = tirx.min(tirx.max(real[0] - tirx.Cast(kind, whole[0]), zero), one)
    t = share[0]
    same = inputs.equal(outputs)  # nothing moves, and no neighbour is read
    if cubic:
        values = [_far(t + one, -0.75), _near(t, -0.75), _near(one - t, -0.75)]
        values.append(_far(one - t + one, -0.75))
        low = whole[0] - 1
    else:
        real_share = tirx.Select(same, zero, t)
        values = [one - real_share, real_share]
        low = tirx.Select(same, o, whole[0])
    whole[1] = tirx.max(low, wide(0))
    for k in range(len(values)):
        at[row + k] = whole[1]
        weights[row + k] = zero
    for k, value in enumerate(values):
        step = k if cubic else tirx.Select(same, wide(0), wide(k))
        source = tirx.min(tirx.max(low + step, wide(0)), inputs - 1)
        slot = row + (source - whole[1])
        at[slot] = source
        weights[slot] = weights[slot] + value


def _near(x: Any, a: float) -> Any:
    """The cubic filter within one element of its centre."""
    c = [tirx.const(v, x.ty.dtype) for v in (a + 2, a + 3, 1)]
    return (c[0] * x - c[1]) * x * x + c[2]


def _far(x: Any, a: float) -> Any:
    """The cubic filter between one and two elements from its centre."""
    c = [tirx.const(v, x.ty.dtype) for v in (a, 5 * a, 8 * a, 4 * a)]
    return ((c[0] * x - c[1]) * x + c[2]) * x - c[3]


def _filter(base: str, x: Any) -> Any:
    kind = x.ty.dtype
    x = tirx.abs(x)
    zero, one, two = (tirx.const(v, kind) for v in (0, 1, 2))
    if base == "linear":
        return tirx.Select(x < one, one - x, zero)
    return tirx.Select(x < one, _near(x, -0.5), tirx.Select(x < two, _far(x, -0.5), zero))


def _smooth(
    axis: Axis,
    kind: str,
    o: Any,
    row: Any,
    scale: Any,
    inputs: Any,
    outputs: Any,
    taps: Any,
    at: Any,
    weights: Any,
) -> None:
    """The filter as wide as the scale, its weights divided by their sum."""
    half, one = tirx.const(0.5, "float64"), tirx.const(1, kind)
    reach = tirx.const(_TAPS[axis.base] // 2, kind)
    scales, span, total = local(kind, 2), local("int64", 2), local(kind)
    # Aligned corners change the scale and, unlike elsewhere, not the centre.
    scales[0] = tirx.Cast(kind, tirx.Cast("float64", scale) * (tirx.Cast("float64", o) + half))
    scales[1] = tirx.Select(scale >= one, one / scale, one)
    support = tirx.Select(scale >= one, reach * scale, reach)
    first = tirx.Cast("float64", scales[0] - support) + half
    last = tirx.Cast("float64", scales[0] + support) + half
    span[0] = tirx.max(tirx.Cast("int64", tirx.trunc(first)), wide(0))
    span[1] = tirx.min(tirx.Cast("int64", tirx.trunc(last)), inputs) - span[0]
    span[1] = tirx.min(tirx.max(span[1], wide(0)), taps)
    total[0] = tirx.const(0, kind)
    with loops([taps]) as (k,):
        away = tirx.Cast("float64", tirx.Cast(kind, k + span[0]) - scales[0]) + half
        value = _filter(axis.base, tirx.Cast(kind, away * tirx.Cast("float64", scales[1])))
        weights[row + k] = tirx.Select(k < span[1], value, tirx.const(0, kind))
        total[0] = total[0] + weights[row + k]
        at[row + k] = tirx.Select(k < span[1], span[0] + k, wide(-1))
    with loops([taps]) as (k,), T.If(tirx.NE(total[0], tirx.const(0, kind))), T.Then():
        weights[row + k] = weights[row + k] / total[0]


def _whole(count: Any, weights: Any, fixed: Any, bits: Any) -> None:
    """Weights as whole numbers of as many bits as the largest leaves within 15."""
    kind = "float64"
    largest = local(kind)
    largest[0] = tirx.const(0, kind)
    with loops([count]) as (k,):
        largest[0] = tirx.max(largest[0], weights[k])
    bits[0] = tirx.const(0, "int32")
    for p in range(_MOST_BITS):
        value = largest[0] * tirx.const(float(2 ** (p + 1)), kind) + tirx.const(0.5, kind)
        bits[0] = bits[0] + tirx.Cast("int32", value < tirx.const(float(1 << 15), kind))
    with loops([count]) as (k,):
        scaled = weights[k] * tirx.Cast(kind, tirx.const(1, "int32") << bits[0])
        down = tirx.Select(weights[k] < 0, tirx.const(-0.5, kind), tirx.const(0.5, kind))
        fixed[k] = tirx.Cast("int32", tirx.trunc(scaled + down))
