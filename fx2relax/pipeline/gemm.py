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
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx

from . import depthwise
from .blocks import Axis
from .contractions import Contraction, evaluate, find
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
from .panels import Panels
from .steps import Written, written
from .tiles import Tiles, choose, lanes_of, rows_of_plane

_log = logging.getLogger(__name__)
# With fewer rows than this, copying columns costs as much as summing.
_FEW_ROWS = 4
# A tile has whole lines of a plane that are no longer than this.
_WIDEST_LINE = 256
_SUMS = 32 << 10


def tile(func: Any, target: Any, tiles: Tiles | None = None) -> Any:
    """A kernel in tiles where it holds a contraction that suits them; None elsewhere.

    Args:
        func: the kernel, not scheduled.
        target: a `tvm.target.Target`.
        tiles: their sizes; chosen when left out.
    """
    try:
        found = find(func)
        threads = int(target.attrs.get("num-cores", 0)) or 1
        return None if found is None else generate(func, found, target, threads, tiles)
    except Exception as error:
        # TVM's schedule errors have no common class; whatever happens, the kernel is valid.
        _log.debug("a contraction is not tiled: %s", str(error)[:500])
        return None


def tiles_of(func: Any, target: Any) -> Tiles | None:
    """The sizes that `tile` chooses for a kernel; None where it has no tiles of such sizes."""
    found = find(func)
    if found is None or depthwise.suits(found) or tile(func, target) is None:
        return None
    threads = int(target.attrs.get("num-cores", 0)) or 1
    return _shape(found, target, threads).tiles


def generate(
    func: Any, found: Contraction, target: Any, threads: int, tiles: Tiles | None = None
) -> Any:
    """The kernel with loops in place of its blocks; None where tiles do not suit it."""
    axes = [found.k, *found.batch, *found.rows, *found.columns]
    if any(a.length == 0 or str(a.var.ty.dtype) != INDEX for a in axes):
        return None
    if depthwise.suits(found):  # whose planes have sizes of their own
        return depthwise.generate(func, found, lanes_of(target, found.dtype), threads)
    rows = product([size(a) for a in found.rows])
    few = isinstance(rows, int) and rows <= _FEW_ROWS
    if few and not found.panels and found.window is None:
        return None
    shape = _shape(found, target, threads, tiles)
    sums = tirx.decl_buffer((shape.tiles.block * shape.tiles.columns,), found.dtype, "sums")
    steps = written(found, list(func.params), sums)
    if steps is None:
        return None
    body = _Kernel(found, shape, sums, steps, threads).body()
    return func.with_body(body).with_attr("tirx.is_scheduled", True)


@dataclass(frozen=True)
class _Shape:
    """How a contraction is cut: `outer` axes one by one, whole `lines` of a plane or columns."""

    tiles: Tiles
    outer: list[Axis]
    lines: Axis | None
    height: int


def _shape(found: Contraction, target: Any, threads: int, tiles: Tiles | None = None) -> _Shape:
    columns = found.columns
    width = columns[-1].length
    plane = len(columns) > 1 and width is not None and width <= _WIDEST_LINE and not found.panels
    lines = columns[-2] if plane else None
    outer = [*found.batch, *columns[: -2 if plane else -1]]
    known = [a.length for a in outer]
    batch = None if None in known else math.prod(n for n in known if n is not None)
    rows = product([size(a) for a in found.rows])
    tiles = tiles or choose(
        rows if isinstance(rows, int) else None,
        found.k.length,
        None if lines is not None else width,
        batch,
        target=target,
        dtype=found.dtype,
        threads=threads,
    )
    if lines is None or width is None:
        return _Shape(tiles, outer, None, 1)
    height = rows_of_plane(lines.length or _WIDEST_LINE, width, tiles)
    wide = -(-height * width // tiles.lanes) * tiles.lanes
    most = max(_SUMS // wide // tiles.rows, 1) * tiles.rows
    tiles = replace(tiles, columns=wide, block=min(tiles.block, most))
    return _Shape(tiles, outer, lines, height)


class _Kernel:
    """The statements of one contraction."""

    def __init__(
        self, found: Contraction, shape: _Shape, sums: Any, steps: Written, threads: int
    ) -> None:
        self.found, self.shape, self.sums, self.steps = found, shape, sums, steps
        self.tiles, self.lines, self.threads = shape.tiles, shape.lines, threads
        self.zero = tirx.const(0, found.dtype)
        self.rows = product([size(a) for a in found.rows])
        self.depth = size(found.k)
        self.column = found.columns[-1]
        self.width = size(self.column)
        turns = parts(self.depth, self.tiles.depth)
        self.once = isinstance(turns, int) and turns == 1
        self.panels = None
        if not found.panels:
            self.panels = Panels(found, self.tiles, self.lines, self.width, self.element)

    # Where in the tensors a task is.

    def element(self, at: dict[Any, Any], k: Any, expr: Any) -> Any:
        """An expression where `k` and some axes have values, and the others those of the task."""
        return evaluate(expr, self.everywhere({**at, self.found.k.var: number(k)}))

    def everywhere(self, at: dict[Any, Any]) -> dict[Any, Any]:
        """All axes' values, that of an axis which is both batch and row among them."""
        places = {**self.places, **at}
        group = self.found.group
        if group is None:
            return places
        member = places.get(group.member.var, number(0))
        return {**places, group.axis: places[group.number.var] * group.size + member}

    # The loops over tasks.

    def body(self) -> Any:
        """All of the kernel."""
        blocks = parts(self.rows, self.tiles.block)
        if self.lines is not None:
            spans = parts(size(self.lines), self.shape.height)
        else:
            spans = parts(self.width, self.tiles.columns)

        def task(index: Any) -> Any:
            values = []
            for count in (blocks, spans):
                one = isinstance(count, int) and count == 1
                values.append(number(0) if one else tirx.floormod(index, number(count)))
                index = index if one else tirx.floordiv(index, number(count))
            self.places = split(index, self.shape.outer)
            return self.task(values[1], values[0])

        count = product([*(size(a) for a in self.shape.outer), spans, blocks])
        return loop("task", count, task, PARALLEL if self._worth() else SERIAL)

    def _worth(self) -> bool:
        axes = [*self.found.columns, *self.found.batch, self.found.k]
        work = self.rows * product([size(a) for a in axes])
        return worth(work if isinstance(work, int) else math.inf, self.threads)

    def task(self, span: Any, block: Any) -> Any:
        """One tile of the result."""
        tiles = self.tiles
        self.first_row = block * tiles.block
        self.count_rows = part_from(self.rows, self.first_row, tiles.block)
        if self.lines is not None:
            self.first = span * self.shape.height
            self.count = part_from(size(self.lines), self.first, self.shape.height)
        else:
            self.first = span * tiles.columns
            self.count = part_from(self.width, self.first, tiles.columns)
        columns = self.count if self.lines is None else self.count * self.width
        self.count_panels = parts(columns, tiles.lanes)
        statements = [tirx.AllocBuffer(self.sums)]
        statements += [] if self.panels is None else self.panels.allocate()
        if not self.once:
            everything = tiles.block * tiles.columns
            statements.append(
                vectors(everything, lambda j: tirx.BufferStore(self.sums, self.zero, [j]))
            )
        statements.append(loop("turn", parts(self.depth, tiles.depth), self.turn))
        return tirx.SeqStmt([*statements, self.finish()])

    # One part of the sums.

    def turn(self, turn: Any) -> Any:
        """Add the products of one part of `k` to every sum of the tile."""
        start = turn * self.tiles.depth
        depth = part_from(self.depth, start, self.tiles.depth)
        statements = []
        if self.panels is not None:
            statements.append(
                self.panels.pack(self.first, self.count, self.count_panels, start, depth)
            )
        heights = parts(self.count_rows, self.tiles.rows)

        def column(panel: Any) -> Any:
            return loop("row", heights, lambda i: self.register_tile(panel, i, start, depth))

        return in_turn([*statements, loop("panel", self.count_panels, column)])

    def register_tile(self, panel: Any, tile: Any, start: Any, depth: Any) -> Any:
        """The sums of some rows of one panel."""
        tiles = self.tiles
        wide, chains = tiles.lanes, tiles.chains
        statements: list[Any] = []
        rows, sums = [], []
        for u in range(tiles.rows):
            at = self.first_row + tile * tiles.rows + u
            if not (isinstance(self.rows, int) and self.rows % tiles.rows == 0):
                at = tirx.min(at, number(self.rows) - 1)
            var = tirx.Var(f"row{u}", INDEX)
            rows.append(split(var, self.found.rows))
            # One buffer for each row: TVM puts only small ones on the stack.
            sums.append(tirx.decl_buffer((wide * chains,), self.found.dtype, f"sum{u}"))
            statements += [tirx.Bind(var, at), tirx.AllocBuffer(sums[-1])]
        for buffer in sums:
            for chain in range(chains):
                statements.append(self._cleared(buffer, chain * wide))

        def step(k: Any, chain: int) -> list[Any]:
            return [
                self._added(buffer, chain * wide, row, panel, start, k)
                for buffer, row in zip(sums, rows, strict=True)
            ]

        whole = quotient(depth, chains)
        done = whole * chains
        statements.append(
            loop(
                "k",
                whole,
                lambda k: in_turn([s for c in range(chains) for s in step(k * chains + c, c)]),
            )
        )
        if not (isinstance(depth, int) and depth == done) and chains > 1:
            statements.append(loop("k", depth - done, lambda k: in_turn(step(done + k, 0))))
        for u, buffer in enumerate(sums):
            place = (tile * tiles.rows + u) * tiles.columns + panel * wide
            statements.append(self._moved(buffer, place))
        return tirx.SeqStmt(statements)

    def _cleared(self, buffer: Any, place: int) -> Any:
        return lanes(self.tiles.lanes, lambda j: tirx.BufferStore(buffer, self.zero, [j + place]))

    def _added(
        self, buffer: Any, place: int, row: dict[Any, Any], panel: Any, start: Any, k: Any
    ) -> Any:
        """One product in each lane."""
        x = self.element(row, start + k, self.found.x)

        def one(j: Any) -> Any:
            term = x * self.y(panel, start, k, j)
            return tirx.BufferStore(
                buffer, tirx.BufferLoad(buffer, [j + place]) + term, [j + place]
            )

        return lanes(self.tiles.lanes, one)

    def _moved(self, buffer: Any, place: Any) -> Any:
        """One row of sums from registers to the tile in cache."""
        wide = self.tiles.lanes

        def one(j: Any) -> Any:
            values = [tirx.BufferLoad(buffer, [j + c * wide]) for c in range(self.tiles.chains)]
            while len(values) > 1:
                values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
            value = values[0]
            if not self.once:
                value = tirx.BufferLoad(self.sums, [place + j]) + value
            return tirx.BufferStore(self.sums, value, [place + j])

        return lanes(wide, one)

    def y(self, panel: Any, start: Any, k: Any, lane: Any) -> Any:
        """An element of a panel of `y`."""
        if self.panels is not None:
            return self.panels.read(panel, k, lane)
        first = quotient(self.first, self.tiles.lanes)

        def read(load: Any) -> Any:
            lead = list(load.indices)[:-3]
            return tirx.BufferLoad(load.source, [*lead, first + panel, number(start + k), lane])

        at = {self.found.k.var: number(0), self.column.var: number(0)}
        return evaluate(self.found.y, self.everywhere(at), read)

    # What follows.

    def finish(self) -> Any:
        """Do what follows to each sum, and store it."""

        def row(i: Any) -> Any:
            var = tirx.Var("at", INDEX)
            rows = split(var, self.found.rows)
            steps = [self.along(step, i, rows) for step in self.steps.steps]
            return tirx.SeqStmt([tirx.Bind(var, self.first_row + i), *steps])

        rows = loop("row", self.count_rows, row)
        return in_turn([*(tirx.AllocBuffer(b) for b in self.steps.buffers), rows])

    def along(self, step: Any, i: Any, rows: dict[Any, Any]) -> Any:
        """One step for one row of the tile."""
        first = i * self.tiles.columns
        if self.lines is None:

            def one(j: Any) -> Any:
                at = {**rows, self.column.var: self.first + j}
                return step(self.everywhere(at), first + j)

            return vectors(self.count, one)
        lines = self.lines

        def line(y: Any) -> Any:
            def one(j: Any) -> Any:
                at = {**rows, lines.var: self.first + y, self.column.var: j}
                return step(self.everywhere(at), first + y * self.width + j)

            return vectors(self.width, one)

        return loop("line", self.count, line)
