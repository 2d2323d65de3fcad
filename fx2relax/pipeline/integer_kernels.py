"""Kernels of products of small integers: four at a time, in words of 32 bits.

The processor multiplies four unsigned bytes by four signed ones and adds the products to a sum of
32 bits. So the bytes of `x` are unsigned ones (signed ones are shifted by 128, as is their zero
point), four of one row to a word; those of the weight are signed, four of one column to a word.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import te, tirx

from fx2relax.compat import IRBuilder, T
from fx2relax.elements import Elements

from .loops import worth
from .nests import INDEX, number
from .target import has_features

BYTES = 4
# Rows of tiles that one task computes: a panel of the weight is read once for all of them.
_TILES = 4
# The release of LLVM from which on the instruction's factors are vectors of bytes, not of words.
_TAKES_BYTES = 22
_INTRINSIC = "llvm.x86.avx512.vpdpbusd."


@dataclass(frozen=True)
class Unit:
    """The instruction's width in words, how many rows of a tile the registers hold, threads."""

    lanes: int
    rows: int
    threads: int

    @property
    def columns(self) -> int:
        """How many columns a panel has."""
        return 2 * self.lanes

    def dot(self, total: Any, x: Any, w: Any) -> Any:
        """A vector of sums with the products of a word and a vector of words added."""
        factors = [tirx.Broadcast(x, self.lanes), w]
        if tvm.target.codegen.llvm_version_major() >= _TAKES_BYTES:
            factors = [tirx.reinterpret(f"int8x{BYTES * self.lanes}", f) for f in factors]
        name = f"{_INTRINSIC}{32 * self.lanes}"
        return tirx.call_llvm_pure_intrin(f"int32x{self.lanes}", name, total, *factors)


def unit_of(target: Any) -> Unit | None:
    """The target's instruction for integer products; None where it has none."""
    threads = int(target.attrs.get("num-cores", 0)) or 1
    if has_features(target, "avx512vnni", "avx512bw"):
        return Unit(16, 12, threads)
    return Unit(8, 6, threads) if has_features(target, "avxvnni") else None


@dataclass(frozen=True)
class Window:
    """What a row of `x` is multiplied by: `taps` along two axes, each of them some words long.

    Attributes:
        plane: output rows of an image, (height, width).
        image: words of an image of `x`, of one of its lines and of one of its points.
        stride: points from one output row to the next, along both axes.
        taps: how many parts a row has, along both axes.
        step: words from one part to the next, along both axes.
        words: how many words a part has.
    """

    plane: tuple[int, int]
    image: tuple[int, int, int]
    stride: tuple[int, int]
    taps: tuple[int, int]
    step: tuple[int, int]
    words: int

    @property
    def depth(self) -> int:
        """How many words a row has."""
        return self.taps[0] * self.taps[1] * self.words

    def base(self, row: Any) -> Any:
        """The first word of a row."""
        height, width = self.plane
        whole, line, point = self.image
        if height == width == 1:
            return row * whole
        x = tirx.floormod(row, width)
        rest = tirx.floordiv(row, width)
        y, image = tirx.floormod(rest, height), tirx.floordiv(rest, height)
        return image * whole + y * (self.stride[0] * line) + x * (self.stride[1] * point)


def arranged(x: Any, pads: Sequence[int], fill: int) -> Any:
    """`x` as words of unsigned bytes, its channels last: (n, h, w, words).

    Args:
        x: (n, channels) or (n, channels, h, w).
        pads: points of padding above, left, below and right.
        fill: the zero point, of which the padding is made.
    """
    signed = str(x.dtype) == "int8"
    top, left, bottom, right = pads
    channels = int(x.shape[1])
    flat = len(x.shape) == 2
    height, width = (1, 1) if flat else (int(x.shape[2]), int(x.shape[3]))

    def byte(n: Any, y: Any, column: Any, channel: Any) -> Any:
        value = x(n, channel) if flat else x(n, channel, y - top, column - left)
        if signed:
            value = tirx.Cast("int32", value) + 128
        return tirx.Cast("uint32", tirx.Cast("uint8", value))

    def word(n: Any, y: Any, column: Any, w: Any) -> Any:
        total = None
        for i in range(BYTES):
            channel = w * BYTES + i
            value = byte(n, y, column, channel)
            inside = []
            if any(pads):
                inside = [y >= top, y < height + top, column >= left, column < width + left]
            if inside:
                value = tirx.if_then_else(
                    tirx.all(*inside), value, tirx.const(fill + 128 * signed, "uint32")
                )
            if channels % BYTES and i >= channels % BYTES:
                value = tirx.if_then_else(channel < channels, value, tirx.const(0, "uint32"))
            value = value << tirx.const(8 * i, "uint32") if i else value
            total = value if total is None else total | value
        return tirx.reinterpret("int32", total)

    shape = (x.shape[0], height + top + bottom, width + left + right, -(-channels // BYTES))
    return te.compute(shape, word, name="words")


def packed(weight: Any, columns: int) -> Any:
    """A weight as panels of words: (panels, taps, taps, words, columns), zeros beyond its end.

    `weight`: (outputs, inputs) or (outputs, inputs, taps, taps).
    """
    outputs, inputs = int(weight.shape[0]), int(weight.shape[1])
    taps = [int(s) for s in weight.shape[2:]] or [1, 1]

    def byte(o: Any, channel: Any, a: Any, b: Any) -> Any:
        value = weight(o, channel, a, b) if len(weight.shape) == 4 else weight(o, channel)
        inside = tirx.all(o < outputs, channel < inputs)
        value = tirx.Cast("uint32", tirx.Cast("uint8", value))
        return tirx.if_then_else(inside, value, tirx.const(0, "uint32"))

    def word(p: Any, a: Any, b: Any, w: Any, lane: Any) -> Any:
        total = None
        for i in range(BYTES):
            value = byte(p * columns + lane, w * BYTES + i, a, b)
            value = value << tirx.const(8 * i, "uint32") if i else value
            total = value if total is None else total | value
        return tirx.reinterpret("int32", total)

    shape = (-(-outputs // columns), *taps, -(-inputs // BYTES), columns)
    return te.compute(shape, word, name="packed")


def totals(weight: Any) -> Any:
    """The sum of each output's weights."""
    axes = [te.reduce_axis((0, s), f"k{i}") for i, s in enumerate(weight.shape[1:])]
    return te.compute(
        (weight.shape[0],),
        lambda o: te.sum(weight(o, *axes).astype("int32"), axis=axes),
        name="totals",
    )


def row_totals(words: Any, points: Any, zero: Any, rows: Any, *, window: Window, depth: int) -> Any:
    """Each row's sum less its zero points, where a weight has zero points; else zeros.

    Args:
        words: what `arranged` gives, flat.
        points: the weight's zero points, one for each column.
        zero: the zero point of the bytes, 0-d.
        rows: how many rows there are.
        window: where their parts are.
        depth: how many elements a row has.
    """

    def body(x: Any, points: Any, zero: Any, out: Any) -> None:
        used = _local("int32", 1)
        used[0] = 0
        with T.serial(0, int(points.shape[0])) as j:
            used[0] = used[0] | points[j]
        with T.serial(number(0), number(rows)) as r:
            out[r] = 0
            with T.If(used[0] != 0), T.Then():
                base = window.base(r)
                with (
                    T.serial(0, window.taps[0]) as a,
                    T.serial(0, window.taps[1]) as b,
                    T.serial(0, window.words) as k,
                ):
                    place = base + _wide(a) * window.step[0] + _wide(b) * window.step[1]
                    word = tirx.reinterpret("uint32", x[place + _wide(k)])
                    for i in range(BYTES):
                        shifted = (word >> tirx.const(8 * i, "uint32")) & tirx.const(255, "uint32")
                        out[r] += tirx.Cast("int32", shifted)
                out[r] = out[r] - zero[0] * depth

    return _statements("row_totals", body, [words, points, zero], (rows,), "int32")


def product(
    words: Any,
    weight: Any,
    corrections: Any,
    floats: Sequence[Any],
    rows: Any,
    *,
    window: Window,
    unit: Unit,
) -> Any:
    """``sums - corrections`` in int32, or ``(sums - corrections - points * totals) * factors``.

    Rows by columns, flat; the second is float32.

    Args:
        words: what `arranged` gives, flat.
        weight: what `packed` gives, flat.
        corrections: the zero point of `words` times each column's total.
        floats: for float32: each column's zero point, what `row_totals` gives, and each column's
            scale times that of `words`.
        rows: how many rows there are.
        window: where their parts are.
        unit: the instruction.
    """
    columns = int(corrections.shape[0])
    lanes = unit.lanes
    height = unit.rows if not isinstance(rows, int) else min(unit.rows, rows)
    tiles = tirx.floordiv(number(rows) + (height - 1), number(height))
    tasks = tirx.floordiv(tiles + (_TILES - 1), number(_TILES))
    panel_words = window.depth * unit.columns

    def tile(ins: Sequence[Any], out: Any, panel: Any, first: Any, halves: int, rest: int) -> None:
        x, w, corrections, *floats = ins

        def result(sums: Any, row: Any, place: Any, count: int) -> Any:
            """What the sums of one row at one place, or at a vector of them, become."""
            value = sums - corrections[place]
            if not floats:
                return value
            points, totals, factors = floats
            whole = totals[row] if count == 1 else tirx.Broadcast(totals[row], count)
            value = value - points[place] * whole
            kind = "float32" if count == 1 else f"float32x{count}"
            return tirx.Cast(kind, value) * factors[place]

        bases = [_local(INDEX, 1) for _ in range(height)]
        for u, base in enumerate(bases):
            base[0] = window.base(tirx.min(first + u, number(rows) - 1))
        sums = [[_local("int32", lanes) for _ in range(halves)] for _ in range(height)]
        for one in (s for row in sums for s in row):
            one[_ramp(0, lanes)] = tirx.Broadcast(tirx.const(0, "int32"), lanes)
        with (
            T.serial(0, window.taps[0]) as a,
            T.serial(0, window.taps[1]) as b,
            T.serial(0, window.words) as k,
        ):
            part = (_wide(a) * window.taps[1] + _wide(b)) * window.words + _wide(k)
            at = panel * panel_words + part * unit.columns
            here = _wide(a) * window.step[0] + _wide(b) * window.step[1] + _wide(k)
            for u in range(height):
                for h in range(halves):
                    total = sums[u][h]
                    total[_ramp(0, lanes)] = unit.dot(
                        total[_ramp(0, lanes)],
                        x[bases[u][0] + here],
                        w[_ramp(at + h * lanes, lanes)],
                    )
        for u in range(height):
            row = tirx.min(first + u, number(rows) - 1)
            for h in range(halves):
                column = panel * unit.columns + h * lanes
                if rest and h == halves - 1:
                    with T.serial(0, rest) as j:
                        place = column + _wide(j)
                        out[row * columns + place] = result(sums[u][h][j], row, place, 1)
                    continue
                value = result(sums[u][h][_ramp(0, lanes)], row, _ramp(column, lanes), lanes)
                out[_ramp(row * columns + column, lanes)] = value

    full, left = divmod(columns, unit.columns)
    work = rows * columns * window.depth if isinstance(rows, int) else math.inf
    shared = T.parallel if worth(work, unit.threads) else T.serial
    # Where there are few rows the panels are shared by the threads, else the rows.
    few = isinstance(rows, int) and rows <= height * _TILES

    def body(*buffers: Any) -> None:
        *ins, out = buffers

        def rows_of(task: Any, panel: Any, halves: int, rest: int) -> None:
            with T.serial(number(0), number(_TILES)) as t:
                first = (task * _TILES + t) * height
                with T.If(first < number(rows)), T.Then():
                    tile(ins, out, panel, first, halves, rest)

        def panels(task: Any, kind: Any) -> None:
            if full:
                with kind(number(0), number(full)) as panel:
                    rows_of(task, panel, 2, 0)
            if left:
                rows_of(task, number(full), -(-left // lanes), left % lanes)

        if few:
            panels(number(0), shared)
            return
        with shared(number(0), tasks) as task:
            panels(task, T.serial)

    operands = [words, weight, corrections, *floats]
    kind = "float32" if floats else "int32"
    return _statements("integer_product", body, operands, (rows * columns,), kind)


def _statements(name: str, body: Any, ins: Sequence[Any], shape: Sequence[Any], kind: str) -> Any:
    """A kernel of statements over flat tensors."""

    def statements(given: Any, made: Any) -> Any:
        with IRBuilder() as builder:
            with T.attr(0, "fx2relax", "statements"):
                body(*(Elements(b) for b in (*given, *made)))
            return builder.get().body

    return te.extern([tuple(shape)], list(ins), statements, dtype=[kind], name=name)


def _local(kind: str, count: int) -> Any:
    return Elements(T.alloc_buffer((count,), kind, scope="global"))


def _ramp(first: Any, lanes: int) -> Any:
    return tirx.Ramp(number(first), number(1), lanes)


def _wide(index: Any) -> Any:
    return index if str(index.ty.dtype) == INDEX else tirx.Cast(INDEX, index)
