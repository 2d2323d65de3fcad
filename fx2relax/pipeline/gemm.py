"""Contractions as loops over tiles: sums in registers, packed columns and results in cache.

A task is a tile of the result, some rows by some columns. It copies the columns of `y` that it
needs into panels as wide as the register tile, unless they have been packed before; sums tile by
tile, in registers, over a part of `k` at a time; and then does what follows to the sums, which are
still in cache. The rows of `x` are read where they are: one element at a time, for all columns.

A tile that juts out below computes its last row several times, and one that juts out on the right
computes with zeros: neither is stored.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx

from .blocks import Axis
from .contractions import Contraction, Step, find, last_load, runs_along
from .contractions import conditions as split_guard
from .steps import written
from .tiles import Tiles, choose, rows_of_plane
from .tir import is_guard
from .vector import VECTOR

_log = logging.getLogger(__name__)
_I64 = "int64"
_SERIAL, _PARALLEL = tirx.ForKind.SERIAL, tirx.ForKind.PARALLEL
_VECTORS = tirx.ForKind.VECTORIZED
_WORTH_A_THREAD = 60_000
# With fewer rows than this, copying columns costs as much as summing.
_FEW_ROWS = 4
_WIDEST_LINE = 256


def number(value: Any) -> Any:
    """An index as an expression."""
    return tirx.const(value, _I64) if isinstance(value, int) else value


def loop(
    name: str,
    extent: Any,
    body: Callable[[Any], Any],
    kind: Any = _SERIAL,
    marks: dict[str, Any] | None = None,
) -> Any:
    """A loop from 0; ``body(variable)`` gives its statement."""
    if isinstance(extent, int) and extent == 1 and kind is _SERIAL:
        return body(number(0))
    var = tirx.Var(name, _I64)
    return tirx.For(var, number(0), number(extent), kind, body(var), None, marks or {})


def vectors(extent: Any, body: Callable[[Any], Any]) -> Any:
    """A loop of any extent over contiguous elements."""
    return loop("column", extent, body, marks={VECTOR: 1})


def lanes(count: int, body: Callable[[Any], Any]) -> Any:
    """A loop that is one vector."""
    return loop("lane", count, body, _VECTORS)


def size(axis: Axis) -> Any:
    """An axis' length, an int where it is known."""
    return axis.extent if axis.length is None else axis.length


def product(sizes: Sequence[Any]) -> Any:
    """The product of sizes."""
    result: Any = 1
    for s in sizes:
        result = result * s
    return result


def parts(whole: Any, part: int) -> Any:
    """How many parts of a size there are, the last one perhaps smaller."""
    if isinstance(whole, int):
        return -(-whole // part)
    return tirx.floordiv(whole + (part - 1), number(part))


def quotient(a: Any, b: int) -> Any:
    """``a // b`` of sizes."""
    return a // b if isinstance(a, int) else tirx.floordiv(a, number(b))


def least(a: Any, b: Any) -> Any:
    """The smaller of two sizes."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return tirx.min(number(a), number(b))


def split(flat: Any, axes: Sequence[Axis]) -> dict[Any, Any]:
    """The value of each axis where all of them, taken as one, have this one."""
    values: dict[Any, Any] = {}
    for n, axis in reversed(list(enumerate(axes))):
        if n == 0:
            values[axis.var] = number(flat)
        elif axis.length == 1:
            values[axis.var] = number(0)
        else:
            values[axis.var] = tirx.floormod(flat, number(size(axis)))
            flat = tirx.floordiv(flat, number(size(axis)))
    return values


def generate(func: Any, found: Contraction, target: Any, threads: int) -> Any:
    """The kernel with loops in place of its blocks; None where these tiles do not suit it."""
    axes = [found.k, *found.batch, *found.rows, *found.columns]
    if any(a.length == 0 or str(a.var.ty.dtype) != _I64 for a in axes):
        return None
    rows = product([size(a) for a in found.rows])
    few = isinstance(rows, int) and rows <= _FEW_ROWS
    if few and not found.panels and found.window is None:
        return None
    kernel = _Kernel(found, list(func.params), target, threads)
    if kernel.ways is None:
        return None
    return func.with_body(kernel.body()).with_attr("tirx.is_scheduled", True)


class _Kernel:
    """The statements of one contraction."""

    def __init__(self, found: Contraction, params: list[Any], target: Any, threads: int) -> None:
        self.found, self.threads = found, threads
        self.dtype = found.dtype
        self.zero = tirx.const(0, found.dtype)
        self.rows = product([size(a) for a in found.rows])
        self.depth = size(found.k)
        columns = found.columns
        width = columns[-1].length
        self.lines: Axis | None = None
        if len(columns) > 1 and width is not None and width <= _WIDEST_LINE and not found.panels:
            self.lines = columns[-2]
            self.outer = [*found.batch, *columns[:-2]]
        else:
            self.outer = [*found.batch, *columns[:-1]]
        self.column = columns[-1]
        self.width = size(self.column)
        sizes = [a.length for a in self.outer]
        batch = None if None in sizes else math.prod(s for s in sizes if s is not None)
        self.tiles = self._tiles(target, batch)
        size_of_tile = self.tiles.block * self.tiles.columns
        self.sums = tirx.decl_buffer((size_of_tile,), self.dtype, "sums")
        self.ways = written(found, params, self.sums)

    def _tiles(self, target: Any, batch: int | None) -> Tiles:
        known = [s if isinstance(s, int) else None for s in (self.rows, self.depth)]
        per_task = self.lines.length if self.lines is not None else 1
        whole = None if None in (self.column.length, per_task) else per_task * self.column.length  # type: ignore[operator]
        tiles = choose(
            *known, whole, batch, target=target, dtype=self.dtype, threads=self.threads
        )
        self.height = 1
        if self.lines is not None:
            # A tile of whole lines, so that it is read and written line by line.
            length = self.lines.length or _WIDEST_LINE
            self.height = rows_of_plane(length, self.width, tiles.lanes, tiles.depth, 4)
            wide = -(-self.height * self.width // tiles.lanes) * tiles.lanes
            most = max((32 << 10) // wide // tiles.rows, 1) * tiles.rows
            block = min(tiles.block, most)
            tiles = Tiles(tiles.rows, tiles.lanes, tiles.chains, block, wide, tiles.depth)
        return tiles

    # The loops over tasks.

    def body(self) -> Any:
        """All of the kernel."""
        tiles = self.tiles
        blocks = parts(self.rows, tiles.block)
        if self.lines is not None:
            spans = parts(size(self.lines), self.height)
        else:
            spans = parts(self.width, tiles.columns)
        batch = [size(a) for a in self.outer]
        count = product([*batch, spans, blocks])

        def task(flat: Any) -> Any:
            index = flat
            values = []
            for part in reversed([spans, blocks]):
                if isinstance(part, int) and part == 1:
                    values.append(number(0))
                else:
                    values.append(tirx.floormod(index, number(part)))
                    index = tirx.floordiv(index, number(part))
            block, span = values
            return self.task(split(index, self.outer), span, block)

        kind = _PARALLEL if self._worth() else _SERIAL
        return loop("task", count, task, kind)

    def _worth(self) -> bool:
        sizes = [self.rows, self.depth, *(size(a) for a in self.found.columns + self.found.batch)]
        known = all(isinstance(s, int) for s in sizes)
        return self.threads > 1 and (not known or product(sizes) > _WORTH_A_THREAD)

    def task(self, batch: dict[Any, Any], span: Any, block: Any) -> Any:
        """One tile of the result."""
        tiles = self.tiles
        self.places = batch
        self.first_row = block * tiles.block
        self.count_rows = least(tiles.block, self._left(self.rows, self.first_row, tiles.block))
        if self.lines is not None:
            self.first = span * self.height
            self.count = least(
                self.height, self._left(size(self.lines), self.first, self.height)
            )
            filled = self.count * self.width
        else:
            self.first = span * tiles.columns
            self.count = least(tiles.columns, self._left(self.width, self.first, tiles.columns))
            filled = self.count
        self.panels = parts(filled, tiles.lanes)
        statements = [tirx.AllocBuffer(self.sums)]
        self.packed = self.line = None
        if not self.found.panels:
            self.packed = tirx.decl_buffer((tiles.columns * tiles.depth,), self.dtype, "packed")
            statements.append(tirx.AllocBuffer(self.packed))
            if self.lines is not None or self.found.window is not None:
                self.line = tirx.decl_buffer((tiles.columns,), self.dtype, "line")
                statements.append(tirx.AllocBuffer(self.line))
                statements.append(
                    vectors(tiles.columns, lambda j: tirx.BufferStore(self.line, self.zero, [j]))
                )
        turns = parts(self.depth, tiles.depth)
        self.once = isinstance(turns, int) and turns == 1
        if not self.once:
            statements.append(
                vectors(
                    tiles.block * tiles.columns,
                    lambda j: tirx.BufferStore(self.sums, self.zero, [j]),
                )
            )
        statements.append(loop("turn", turns, self.turn))
        statements.append(self.finish())
        return tirx.SeqStmt(statements)

    def _left(self, whole: Any, first: Any, part: int) -> Any:
        if isinstance(whole, int) and whole % part == 0:
            return part
        if isinstance(whole, int) and whole < part:
            return whole
        return number(whole) - first

    # One part of the sums.

    def turn(self, turn: Any) -> Any:
        """Add the products of one part of `k` to every sum of the tile."""
        start = turn * self.tiles.depth
        count = least(self.tiles.depth, self._left(self.depth, start, self.tiles.depth))
        statements = []
        if self.packed is not None:
            statements.append(self.pack(start, count))
        heights = parts(self.count_rows, self.tiles.rows)
        statements.append(
            loop(
                "panel",
                self.panels,
                lambda p: loop("row", heights, lambda i: self.sum_up(p, i, start, count)),
            )
        )
        return tirx.SeqStmt(statements) if len(statements) > 1 else statements[0]

    def sum_up(self, panel: Any, tile: Any, start: Any, count: Any) -> Any:
        """One register tile."""
        tiles = self.tiles
        wide, chains = tiles.lanes, tiles.chains
        statements: list[Any] = []
        rows, sums = [], []
        for u in range(tiles.rows):
            at = self.first_row + tile * tiles.rows + u
            if not (isinstance(self.rows, int) and self.rows % tiles.rows == 0):
                at = tirx.min(at, number(self.rows) - 1)
            var = tirx.Var(f"r{u}", _I64)
            statements.append(tirx.Bind(var, at))
            rows.append(split(var, self.found.rows))
            buffer = tirx.decl_buffer((wide * chains,), self.dtype, f"sum{u}")
            statements.append(tirx.AllocBuffer(buffer))
            sums.append(buffer)
        for buffer in sums:
            for c in range(chains):
                statements.append(
                    lanes(wide, lambda j, b=buffer, c=c: tirx.BufferStore(b, self.zero, [j + c * wide]))
                )

        def step(k: Any, chain: int) -> list[Any]:
            return [
                lanes(
                    wide,
                    lambda j, b=b, r=r: tirx.BufferStore(
                        b,
                        tirx.BufferLoad(b, [j + chain * wide])
                        + self.x(r, start + k) * self.y(panel, start, k, j),
                        [j + chain * wide],
                    ),
                )
                for b, r in zip(sums, rows, strict=True)
            ]

        def steps(k: Any) -> Any:
            together = [s for c in range(chains) for s in step(k * chains + c, c)]
            return tirx.SeqStmt(together) if len(together) > 1 else together[0]

        def single(k: Any, done: Any) -> Any:
            together = step(done + k, 0)
            return tirx.SeqStmt(together) if len(together) > 1 else together[0]

        if chains == 1:
            statements.append(loop("k", count, steps))
        else:
            whole = quotient(count, chains)
            statements.append(loop("k", whole, steps))
            done = whole * chains
            if not (isinstance(count, int) and count == done):
                statements.append(loop("k", count - done, lambda k: single(k, done)))
        for u, buffer in enumerate(sums):
            place = (tile * tiles.rows + u) * tiles.columns + panel * wide
            statements.append(lanes(wide, lambda j, b=buffer, p=place: self.add(b, p, j)))
        return tirx.SeqStmt(statements)

    def add(self, buffer: Any, place: Any, lane: Any) -> Any:
        """Move one vector of sums from registers to the tile in cache."""
        wide = self.tiles.lanes
        values = [tirx.BufferLoad(buffer, [lane + c * wide]) for c in range(self.tiles.chains)]
        while len(values) > 1:
            values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
        value = values[0]
        if not self.once:
            value = tirx.BufferLoad(self.sums, [place + lane]) + value
        return tirx.BufferStore(self.sums, value, [place + lane])

    def x(self, row: dict[Any, Any], k: Any) -> Any:
        """An element of `x`."""
        places = self.all_places({**self.places, **row, self.found.k.var: number(k)})
        return Step([], None, [], self.found.x).at(places, lambda load: load)[0]

    def y(self, panel: Any, start: Any, k: Any, lane: Any) -> Any:
        """An element of a panel of `y`."""
        tiles = self.tiles
        if self.packed is not None:
            return tirx.BufferLoad(self.packed, [(panel * tiles.depth + k) * tiles.lanes + lane])
        first = quotient(self.first, tiles.lanes)

        def read(load: Any) -> Any:
            lead = list(load.indices)[:-3]
            return tirx.BufferLoad(load.source, [*lead, first + panel, number(start + k), lane])

        places = {**self.places, self.found.k.var: number(0), self.column.var: number(0)}
        return Step([], None, [], self.found.y).at(places, read)[0]

    def element(self, column: dict[Any, Any], k: Any, y: Any = None) -> Any:
        """An element of `y` where it comes from."""
        places = self.all_places({**self.places, **column, self.found.k.var: k})
        y = self.found.y if y is None else y
        return Step([], None, [], y).at(places, lambda load: load)[0]

    def all_places(self, places: dict[Any, Any]) -> dict[Any, Any]:
        """The axes' values and that of an axis which is both batch and row."""
        group = self.found.group
        if group is None:
            return places
        member = places.get(group.member.var, number(0))
        return {**places, group.axis: places[group.number.var] * group.size + member}

    # Packing.

    def pack(self, start: Any, count: Any) -> Any:
        """Copy a part of the columns of `y` into panels."""
        if self.line is not None:
            return loop("k", count, lambda k: self.pack_by_line(start, k))
        wide = self.tiles.lanes
        whole = quotient(self.count, wide)
        rest = self.count - whole * wide

        def from_y(panel: Any, k: Any, lane: Any) -> Any:
            column = {self.column.var: self.first + panel * wide + lane}
            return self.into(panel, k, lane, self.element(column, start + k))

        def full(k: Any, p: Any) -> Any:
            return lanes(wide, lambda j: from_y(p, k, j))

        if runs_along(self.found.y, self.column.var):
            copy = loop("k", count, lambda k: loop("panel", whole, lambda p: full(k, p)))
        else:
            copy = loop("panel", whole, lambda p: loop("k", count, lambda k: full(k, p)))
        if isinstance(rest, int) and rest == 0:
            return copy

        def last(k: Any) -> Any:
            own = loop("lane", rest, lambda j: from_y(whole, k, j))
            more = loop("lane", wide - rest, lambda j: self.into(whole, k, j + rest, self.zero))
            return tirx.SeqStmt([own, more])

        tail = loop("k", count, last)
        if not isinstance(rest, int):
            tail = tirx.IfThenElse(number(0) < rest, tail, None)
        return tirx.SeqStmt([copy, tail])

    def into(self, panel: Any, k: Any, lane: Any, value: Any) -> Any:
        """Store an element of a panel."""
        place = (panel * self.tiles.depth + k) * self.tiles.lanes + lane
        return tirx.BufferStore(self.packed, value, [place])

    def pack_by_line(self, start: Any, k: Any) -> Any:
        """One element of `k` for all columns: copied as they lie in memory, then into panels."""
        wide = self.tiles.lanes

        def panel(p: Any) -> Any:
            return lanes(
                wide, lambda j: self.into(p, k, j, tirx.BufferLoad(self.line, [p * wide + j]))
            )

        if self.lines is None:
            fill = self.fill({}, self.first, self.count, 0, start + k)
        else:
            lines = self.lines
            fill = loop(
                "line",
                self.count,
                lambda y: self.fill(
                    {lines.var: self.first + y}, 0, self.width, y * self.width, start + k
                ),
            )
        return tirx.SeqStmt([fill, loop("panel", self.panels, panel)])

    def fill(self, at: dict[Any, Any], first: Any, count: Any, place: Any, k: Any) -> Any:
        """Copy elements that lie in one line of the input, zeros where it ends."""
        column, window = self.column.var, self.found.window

        def copied(j: Any) -> Any:
            value = self.element({**at, column: first + j}, k, y)
            return tirx.BufferStore(self.line, value, [place + j])

        def zeros(begin: Any, end: Any) -> Any:
            return loop(
                "column",
                end - begin,
                lambda j: tirx.BufferStore(self.line, self.zero, [place + begin + j]),
            )

        y, conditions = self.found.y, []
        if window is None or not is_guard(y):
            return vectors(count, copied)
        y, conditions = split_guard(y, column)
        taps, stride, before, step = window
        offset = tirx.floormod(k, number(taps)) * step - before
        length = list(last_load(y).source.shape)[-1]
        begin, end = tirx.Var("begin", _I64), tirx.Var("end", _I64)
        low = tirx.floordiv(number(0) - offset + (stride - 1), number(stride)) - first
        high = tirx.floordiv(length - 1 - offset, number(stride)) + 1 - first
        zero, whole = number(0), number(count)
        copy = tirx.SeqStmt(
            [
                tirx.Bind(begin, tirx.min(tirx.max(low, zero), whole)),
                tirx.Bind(end, tirx.min(tirx.max(high, begin), whole)),
                zeros(zero, begin),
                vectors(end - begin, lambda j: copied(begin + j)),
                zeros(end, whole),
            ]
        )
        if not conditions:
            return copy
        condition = self.element(at, k, tirx.all(*conditions))
        return tirx.IfThenElse(condition, copy, zeros(zero, whole))

    # What follows.

    def finish(self) -> Any:
        """Do what follows to each sum, and store it."""

        def row(i: Any) -> Any:
            var = tirx.Var("at", _I64)
            rows = split(var, self.found.rows)
            steps = [self.line_of(step, i, rows) for step in self.ways.steps]
            return tirx.SeqStmt([tirx.Bind(var, self.first_row + i), *steps])

        rows = loop("row", self.count_rows, row)
        if not self.ways.buffers:
            return rows
        return tirx.SeqStmt([*(tirx.AllocBuffer(b) for b in self.ways.buffers), rows])

    def line_of(self, step: Any, i: Any, rows: dict[Any, Any]) -> Any:
        """One step for one row of the tile."""
        wide = self.tiles.columns
        if self.lines is None:

            def one(j: Any) -> Any:
                places = {**self.places, **rows, self.column.var: self.first + j}
                return step(self.all_places(places), i * wide + j)

            return vectors(self.count, one)
        lines = self.lines

        def line(y: Any) -> Any:
            def one(j: Any) -> Any:
                places = {
                    **self.places,
                    **rows,
                    lines.var: self.first + y,
                    self.column.var: j,
                }
                place = i * wide + y * self.width + j
                return step(self.all_places(places), place)

            return vectors(self.width, one)

        return loop("line", self.count, line)


def tile(func: Any, target: Any) -> Any:
    """A kernel in tiles where it holds a contraction that suits them; None elsewhere."""
    try:
        found = find(func)
        threads = int(target.attrs.get("num-cores", 0)) or 1
        return None if found is None else generate(func, found, target, threads)
    except Exception as error:
        # TVM's schedule errors have no common class; whatever happens, the kernel is valid.
        _log.debug("a contraction is not tiled: %s", str(error)[:500])
        return None
