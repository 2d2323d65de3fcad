"""Convolutions of each channel with one filter of its own, as vector loops along the lines.

A task copies some lines of one channel, zeros around them, into a plane in cache; one for each
remainder of the stride, so that whatever a tap meets lies in a row. Sums of a line stay in
registers until all taps are added.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx

from .blocks import Axis
from .contractions import Contraction, evaluate, split_guard
from .loops import worth
from .nests import (
    INDEX,
    PARALLEL,
    SERIAL,
    in_turn,
    lanes,
    loop,
    number,
    part_from,
    parts,
    product,
    quotient,
    size,
    split,
    vectors,
)
from .steps import written

_PLANE = 48 << 10
_MOST_TAPS = 64


def suits(found: Contraction) -> bool:
    """Whether a contraction is such a convolution of planes of known size."""
    if found.plane is None or found.group is None or found.group.size != 1:
        return False
    taps = found.plane[0] * found.plane[1]
    sizes = [a.length for a in found.columns]
    known = len(sizes) == 2 and None not in sizes
    return known and found.k.length == taps and taps <= _MOST_TAPS and bool(found.batch)


def generate(func: Any, found: Contraction, most_lanes: int, threads: int) -> Any:
    """The kernel with loops in place of its blocks; None where it cannot be."""
    lines, column = found.columns
    width = column.length or 0
    wide = most_lanes
    while wide > 4 and -(-width // (wide // 2)) * (wide // 2) < -(-width // wide) * wide:
        wide //= 2
    sums = tirx.decl_buffer((-(-width // wide) * wide,), found.dtype, "sums")
    steps = written(found, list(func.params), sums)
    if steps is None:
        return None
    kernel = _Depthwise(found, lines, column, wide, threads)
    kernel.sums, kernel.steps = sums, steps
    return func.with_body(kernel.body()).with_attr("tirx.is_scheduled", True)


class _Depthwise:
    """The statements of one kernel."""

    sums: Any
    steps: Any

    def __init__(
        self, found: Contraction, lines: Axis, column: Axis, wide: int, threads: int
    ) -> None:
        self.found, self.lines, self.column, self.wide = found, lines, column, wide
        self.threads = threads
        assert found.plane is not None
        self.taps = found.plane[:2]
        self.stride, self.before, self.step = (found.plane[n : n + 2] for n in (2, 4, 6))
        self.zero = tirx.const(0, found.dtype)
        self.width = column.length or 0
        self.padded = -(-self.width // wide) * wide
        # The elements of each remainder that a line of vectors may read.
        reach = (self.padded - 1) * self.stride[1] + (self.taps[1] - 1) * self.step[1] + 1
        self.pitch = -(-reach // self.stride[1])
        self.line = self.pitch * self.stride[1]
        self.height = self._height()
        tall = (self.height - 1) * self.stride[0] + (self.taps[0] - 1) * self.step[0] + 1
        self.plane = tirx.decl_buffer((tall * self.line,), found.dtype, "plane")

    def _height(self) -> int:
        """How many lines of the result a task has."""
        whole = self.lines.length or 1
        lines = max(_PLANE // (self.line * 4), 1)
        halo = (self.taps[0] - 1) * self.step[0]
        most = max((lines - halo) // self.stride[0], 8)
        return math.ceil(whole / math.ceil(whole / most))

    def everywhere(self, at: dict[Any, Any]) -> dict[Any, Any]:
        """All axes' values."""
        group = self.found.group
        assert group is not None
        places = {**self.places, group.member.var: number(0), **at}
        return {**places, group.axis: places[group.number.var]}

    def body(self) -> Any:
        """All of the kernel."""
        found = self.found
        spans = parts(self.lines.length or 0, self.height)

        def task(index: Any) -> Any:
            span = number(0) if spans == 1 else tirx.floormod(index, number(spans))
            rest = index if spans == 1 else tirx.floordiv(index, number(spans))
            self.places = split(rest, found.batch)
            return self.task(span)

        count = product([*(size(a) for a in found.batch), spans])
        work = count * self.height * self.width * self.taps[0] * self.taps[1]
        shared = worth(work if isinstance(work, int) else math.inf, self.threads)
        return loop("task", count, task, PARALLEL if shared else SERIAL)

    def task(self, span: Any) -> Any:
        """Some lines of one channel."""
        first = span * self.height
        count = part_from(self.lines.length, first, self.height)
        tall = (count - 1) * self.stride[0] + (self.taps[0] - 1) * self.step[0] + 1
        return in_turn(
            [
                tirx.AllocBuffer(self.plane),
                tirx.AllocBuffer(self.sums),
                *(tirx.AllocBuffer(b) for b in self.steps.buffers),
                loop("line", tall, lambda r: self.copy(first * self.stride[0] + r, r)),
                loop("line", count, lambda y: self.sum_line(first, y)),
            ]
        )

    def copy(self, source: Any, row: Any) -> Any:
        """One line of the input, its padding counted, into the plane."""
        value, _ = split_guard(self.found.y, self.column.var)
        load = _load_of(value)
        height, length = list(load.source.shape)[-2:]
        stride, before = self.stride[1], self.before[1]
        y = source - self.before[0]
        low, high = number(0), number(self.pitch)
        statements = []
        for remainder in range(stride):
            place = row * self.line + remainder * self.pitch
            begin = min(max(-(-(before - remainder) // stride), 0), self.pitch)
            last = quotient(length - 1 + before - remainder, stride) + 1
            end = tirx.Var("end", INDEX)
            offset = begin * stride + remainder - before
            statements += [
                tirx.Bind(end, tirx.min(tirx.max(last, number(begin)), high)),
                self._zeros(place, low, number(begin)),
                self._copied(value, y, offset, place + begin, end - begin),
                self._zeros(place, end, high),
            ]
        inside = tirx.all(y >= 0, y < height)
        return tirx.IfThenElse(
            inside, in_turn(statements), self._zeros(row * self.line, low, number(self.line))
        )

    def _copied(self, value: Any, y: Any, offset: int, place: Any, count: Any) -> Any:
        """Elements of a line, as far apart as the stride."""

        def one(j: Any) -> Any:
            element = self._input(value, y, j * self.stride[1] + offset)
            return tirx.BufferStore(self.plane, element, [place + j])

        return vectors(count, one)

    def _zeros(self, place: Any, begin: Any, end: Any) -> Any:
        return loop(
            "column",
            end - begin,
            lambda j: tirx.BufferStore(self.plane, self.zero, [place + begin + j]),
        )

    def _input(self, value: Any, y: Any, x: Any) -> Any:
        """An element of this channel."""
        zero = {a.var: number(0) for a in (self.found.k, self.lines, self.column)}

        def read(load: Any) -> Any:
            return tirx.BufferLoad(load.source, [*list(load.indices)[:-2], y, x])

        return evaluate(value, self.everywhere(zero), read)

    def sum_line(self, first: Any, y: Any) -> Any:
        """One line of the result."""
        part = tirx.decl_buffer((self.wide,), self.found.dtype, "part")

        def chunk(c: Any) -> Any:
            statements = [
                tirx.AllocBuffer(part),
                lanes(self.wide, lambda j: tirx.BufferStore(part, self.zero, [j])),
            ]
            for tap in range(self.taps[0] * self.taps[1]):
                statements.append(self._tap(part, tap, y, c * self.wide))
            statements.append(
                lanes(
                    self.wide,
                    lambda j: tirx.BufferStore(
                        self.sums, tirx.BufferLoad(part, [j]), [c * self.wide + j]
                    ),
                )
            )
            return in_turn(statements)

        def after(step: Any) -> Any:
            at = {self.lines.var: first + y}
            return vectors(
                self.width, lambda j: step(self.everywhere({**at, self.column.var: j}), j)
            )

        chunks = loop("chunk", self.padded // self.wide, chunk)
        return in_turn([chunks, *(after(step) for step in self.steps.steps)])

    def _tap(self, part: Any, tap: int, y: Any, column: Any) -> Any:
        """The products with one element of the filter."""
        down, right = (n * s for n, s in zip(divmod(tap, self.taps[1]), self.step, strict=True))
        row = y * self.stride[0] + down
        start = (row * self.stride[1] + right % self.stride[1]) * self.pitch
        start = start + right // self.stride[1] + column
        weight = evaluate(self.found.x, self.everywhere({self.found.k.var: number(tap)}))
        return lanes(
            self.wide,
            lambda j: tirx.BufferStore(
                part,
                tirx.BufferLoad(part, [j]) + weight * tirx.BufferLoad(self.plane, [start + j]),
                [j],
            ),
        )


def _load_of(value: Any) -> Any:
    found: list[Any] = []

    def note(load: Any) -> Any:
        found.append(load)
        return load

    evaluate(value, {}, note)
    return found[-1]
