"""Values of an image or volume at the positions of a grid, and the gradients of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .common import (
    Unsupported,
    cast,
    compute_dtype,
    converts,
    dtype,
    emit,
    relax,
    reshape,
    shape,
    tirx,
)
from .opaque import T, fill, is_large, local, loops, opaque, wide

aten = torch.ops.aten

_LINEAR, _NEAREST, _CUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2


class _Sampler:
    """The statements for one grid position.

    Attributes:
        at: the sources' offsets within a channel; `inside` says which of them exist.
        weight: the sources' weights; `slope` has, axis by axis, their derivatives by position.
    """

    def __init__(
        self,
        kind: str,
        sizes: list[Any],
        mode: int,
        padding: int,
        align: bool,
        slopes: bool = False,
    ) -> None:
        self.kind, self.sizes, self.mode = kind, sizes, mode
        self.padding, self.align, self.slopes = padding, align, slopes
        self.axes = len(sizes)
        self.width = {_LINEAR: 2, _NEAREST: 1, _CUBIC: 4}[mode]
        self.count = self.width**self.axes
        self.place, self.factor = self._local(self.axes), self._local(self.axes)
        self.whole = self._local(self.axes * self.width, "int64")
        self.part = self._local(self.axes * self.width)
        self.change = self._local(self.axes * self.width)
        self.at, self.inside = self._local(self.count, "int64"), self._local(self.count, "bool")
        self.weight = self._local(self.count)
        self.slope = self._local(self.count * self.axes)

    def _local(self, count: int, kind: str | None = None) -> Any:
        return local(kind or self.kind, count)

    def const(self, value: float) -> Any:
        return tirx.const(value, self.kind)

    def move_to(self, grid: Any, row: Any) -> None:
        """Fill the tables for the grid position whose first coordinate is at `row`."""
        for axis, size in enumerate(self.sizes):
            length = tirx.Cast(self.kind, size)
            # The grid's last coordinate belongs to the last axis but comes first.
            value = grid[row + (self.axes - 1 - axis)]
            if str(value.ty.dtype) != self.kind:
                value = tirx.Cast(self.kind, value)
            value = value + self.const(1)
            if self.align:
                self.factor[axis] = (length - self.const(1)) / self.const(2)
                self.place[axis] = value / self.const(2) * (length - self.const(1))
            else:
                self.factor[axis] = length / self.const(2)
                self.place[axis] = (value * length - self.const(1)) / self.const(2)
            if self.mode != _CUBIC:
                self._pad(self.place, axis, self.factor, size)
            self._bound(axis)
            self._taps(axis, size)
        self._join()

    def _bound(self, axis: int) -> None:
        # Where no whole number can be: NaN, infinities and what is far out, all outside.
        place = self.place[axis]
        usual = tirx.And(place > self.const(-1e9), place < self.const(1e9))
        self.place[axis] = tirx.Select(usual, place, self.const(-100))

    def _pad(self, place: Any, axis: int, factor: Any, size: Any) -> None:
        """Move a position within the image, and change the sign or size of its derivative."""
        length = tirx.Cast(self.kind, size)
        last = length - self.const(1)
        if self.padding == _REFLECTION:
            low = self.const(0.0 if self.align else -0.5)
            span = last if self.align else length
            some = tirx.max(span, self.const(1))
            away = place[axis] - low
            if factor is not None:
                factor[axis] = tirx.Select(away < self.const(0), -factor[axis], factor[axis])
            place[axis] = tirx.abs(away)
            turns = tirx.floor(place[axis] / some)
            even = (turns - self.const(2) * tirx.floor(turns / self.const(2))).equal(self.const(0))
            rest = place[axis] - turns * some
            if factor is not None:
                factor[axis] = tirx.Select(even, factor[axis], -factor[axis])
            there = tirx.Select(even, rest + low, some - rest + low)
            place[axis] = tirx.Select(span > self.const(0), there, self.const(0))
        if self.padding != _ZEROS:
            at = place[axis]
            if factor is not None:
                free = tirx.And(at > self.const(0), at < last)
                factor[axis] = tirx.Select(free, factor[axis], self.const(0))
            place[axis] = tirx.max(tirx.min(at, last), self.const(0))

    def _taps(self, axis: int, size: Any) -> None:
        """An axis's source positions, their weights and the derivatives of those."""
        first = axis * self.width
        if self.mode == _NEAREST:
            self.whole[first] = tirx.Cast("int64", tirx.nearbyint(self.place[axis]))
            self.part[first] = self.const(1)
            if self.slopes:
                self.change[first] = self.const(0)
            return
        down = tirx.floor(self.place[axis])
        t = self.place[axis] - down
        one = self.const(1)
        if self.mode == _LINEAR:
            parts, changes = [one - t, t], [-one, one]
        else:
            parts = [_far(t + one), _near(t), _near(one - t), _far(one - t + one)]
            changes = [_far_slope(t + one), _near_slope(t)]
            changes += [-_near_slope(one - t), -_far_slope(one - t + one)]
        for k, (part, change) in enumerate(zip(parts, changes, strict=True)):
            self.part[first + k] = part
            if self.slopes:
                self.change[first + k] = change
        before = wide(1 if self.mode == _CUBIC else 0)
        moved = self._local(1)
        with loops([self.width]) as (tap,):
            moved[0] = down + tirx.Cast(self.kind, tap - before)
            if self.mode == _CUBIC and self.padding != _ZEROS:
                self._pad(moved, 0, None, size)
            self.whole[first + tap] = tirx.Cast("int64", moved[0])

    def _join(self) -> None:
        """Every combination of the axes' sources."""
        with loops([self.count]) as (n,):
            at: Any = wide(0)
            inside: Any = tirx.const(True, "bool")
            places = []
            for axis, size in enumerate(self.sizes):
                step = self.width ** (self.axes - 1 - axis)
                place = axis * self.width + tirx.floormod(tirx.floordiv(n, step), self.width)
                places.append(place)
                source = self.whole[place]
                inside = tirx.And(inside, tirx.And(source >= wide(0), source < wide(size)))
                at = at * size + source
            self.inside[n] = inside
            self.at[n] = tirx.Select(inside, at, wide(0))
            self.weight[n] = _times([self.part[p] for p in places])
            for axis in range(self.axes if self.slopes else 0):
                tables = [self.change if a == axis else self.part for a in range(self.axes)]
                factors = [t[p] for t, p in zip(tables, places, strict=True)]
                self.slope[n * self.axes + axis] = _times(factors)


def _times(factors: Sequence[Any]) -> Any:
    result = factors[0]
    for factor in factors[1:]:
        result = result * factor
    return result


def _numbers(x: Any, *values: float) -> list[Any]:
    return [tirx.const(v, x.ty.dtype) for v in values]


def _near(x: Any) -> Any:
    """The cubic filter within one element of its centre."""
    a, b, c = _numbers(x, 1.25, 2.25, 1)
    return (a * x - b) * x * x + c


def _near_slope(x: Any) -> Any:
    a, b = _numbers(x, 3.75, 4.5)
    return (a * x - b) * x


def _far(x: Any) -> Any:
    """The cubic filter between one and two elements from its centre."""
    a, b, c, d = _numbers(x, -0.75, -3.75, -6, -3)
    return ((a * x - b) * x + c) * x - d


def _far_slope(x: Any) -> Any:
    a, b, c = _numbers(x, -2.25, -7.5, -6)
    return (a * x - b) * x + c


def _counts(x: Any, grid: Any) -> tuple[list[Any], Any]:
    """Batch, channels and positions of the grid; then the image's own sizes."""
    batch, channels, *space = shape(x)
    places: Any = 1
    for size in shape(grid)[1:-1]:
        places = places * size
    return [batch, channels, places, *space], space


def _volume(space: Sequence[Any]) -> Any:
    return _times([wide(s) for s in space])


@converts(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(
    input: Any, grid: Any, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Any:
    """What lies outside counts as 0, as the nearest inside, or is reflected."""
    if interpolation_mode == _CUBIC and len(shape(grid)) == 5:
        raise Unsupported("bicubic sampling of volumes")
    own = dtype(input)
    kind = compute_dtype(own)
    numbers, _ = _counts(input, grid)

    def body(ins: Any, outs: Any, given: list[Any]) -> None:
        batch, channels, places, *space = given
        x, positions, out = ins[0], ins[1], outs[0]
        with loops([batch, places], parallel=0) as (n, p):
            sampler = _Sampler(kind, space, interpolation_mode, padding_mode, align_corners)
            sampler.move_to(positions, (n * places + p) * len(space))
            total = local(kind)
            with loops([channels]) as (c,):
                base = (n * channels + c) * _volume(space)
                total[0] = tirx.const(0, kind)
                # No branch: a source that is not there is read elsewhere, and not used.
                with T.unroll(0, sampler.count) as k:
                    value = x[base + sampler.at[k]]
                    value = value if own == kind else tirx.Cast(kind, value)
                    value = tirx.Select(sampler.inside[k], value, tirx.const(0, kind))
                    total[0] = total[0] + value * sampler.weight[k]
                out[(n * channels + c) * places + p] = tirx.Cast(own, total[0])

    def outputs(given: list[Any]) -> list[tuple[Any, str]]:
        return [(given[0] * given[1] * given[2], own)]

    flat = opaque("grid_sample", body, [input, grid], outputs, numbers)
    return reshape(flat, [*shape(input)[:2], *shape(grid)[1:-1]])


@converts(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sampler_backward(
    grad_output: Any,
    input: Any,
    grid: Any,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[Any, Any]:
    """Gradients of the image, which each position spreads over its sources, and of the grid."""
    own = dtype(input)
    kind = compute_dtype(own)
    numbers, _ = _counts(input, grid)

    def body(ins: Any, outs: Any, given: list[Any]) -> None:
        batch, channels, places, *space = given
        grads, x, positions = ins
        image, moved = outs
        axes, volume = len(space), _volume(space)
        fill(image, batch * channels * volume, lambda _: tirx.const(0, kind))
        parallel = 0 if is_large(batch * channels * places) else None
        with loops([batch, places], parallel) as (n, p):
            settings = (interpolation_mode, padding_mode, align_corners)
            sampler = _Sampler(kind, space, *settings, slopes=True)
            sampler.move_to(positions, (n * places + p) * axes)
            slope = local(kind, axes)
            for axis in range(axes):
                slope[axis] = tirx.const(0, kind)
            with (
                loops([sampler.count, channels]) as (k, c),
                T.If(sampler.inside[k]),
                T.Then(),
            ):
                at = (n * channels + c) * volume + sampler.at[k]
                grad = tirx.Cast(kind, grads[(n * channels + c) * places + p])
                image[at] = image[at] + grad * sampler.weight[k]
                for axis in range(axes):
                    part = grad * tirx.Cast(kind, x[at]) * sampler.slope[k * axes + axis]
                    slope[axis] = slope[axis] + part
            for axis in range(axes):
                to = (n * places + p) * axes + (axes - 1 - axis)
                # The nearest element does not change with the grid.
                still = interpolation_mode == _NEAREST
                total = tirx.const(0, kind) if still else slope[axis] * sampler.factor[axis]
                moved[to] = tirx.Cast(own, total)

    def outputs(given: list[Any]) -> list[tuple[Any, str]]:
        batch, channels, places, *space = given
        return [
            (batch * channels * _volume(space), kind),
            (batch * places * len(space), own),
        ]

    found = emit(opaque("grid_sample_backward", body, [grad_output, input, grid], outputs, numbers))
    image = cast(reshape(relax.TupleGetItem(found, 0), shape(input)), own)
    moved = reshape(relax.TupleGetItem(found, 1), shape(grid))
    return image if output_mask[0] else None, moved
