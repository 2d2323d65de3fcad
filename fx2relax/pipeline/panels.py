"""Columns of a factor, copied into panels that the inner loop of a product reads in a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

from .contractions import Contraction, last_load, runs_along, split_guard
from .nests import INDEX, in_turn, lanes, loop, number, quotient, vectors
from .tiles import Tiles

#: From columns' values, the value of `k`, and an expression for `y` to what it is there.
Element = Callable[[dict[Any, Any], Any, Any], Any]


class Panels:
    """The panels of one task: (panels, depth, lanes), flat.

    Args:
        found: the contraction.
        tiles: the sizes of its tiles.
        lines: the axis before the last one, if a tile has whole lines of the last one.
        width: the length of the last axis.
        element: gives an expression where the axes have values.
    """

    def __init__(
        self, found: Contraction, tiles: Tiles, lines: Any, width: Any, element: Element
    ) -> None:
        self.y, self.window, self.column = found.y, found.window, found.columns[-1].var
        self.tiles, self.lines, self.width, self.element = tiles, lines, width, element
        self.zero = tirx.const(0, found.dtype)
        self.packed = tirx.decl_buffer((tiles.columns * tiles.depth,), found.dtype, "packed")
        by_line = lines is not None or self.window is not None
        self.line = tirx.decl_buffer((tiles.columns,), found.dtype, "line") if by_line else None

    def allocate(self) -> list[Any]:
        """The statements that come before anything is packed."""
        statements = [tirx.AllocBuffer(self.packed)]
        if self.line is not None:
            clear = vectors(self.tiles.columns, lambda j: self._into_line(self.zero, j))
            statements += [tirx.AllocBuffer(self.line), clear]
        return statements

    def read(self, panel: Any, k: Any, lane: Any) -> Any:
        """An element of a panel."""
        return tirx.BufferLoad(self.packed, [self._place(panel, k, lane)])

    def pack(self, first: Any, count: Any, panels: Any, start: Any, depth: Any) -> Any:
        """Copy `count` columns, or lines of them, from `first` on, and `depth` of `k` from `start`.

        They fill so many `panels`; what is left of the last one becomes 0.
        """
        if self.line is not None:
            return loop("k", depth, lambda k: self._by_line(first, count, panels, start, k))
        wide = self.tiles.lanes
        whole = quotient(count, wide)
        rest = count - whole * wide

        def from_y(panel: Any, k: Any, lane: Any) -> Any:
            column = {self.column: first + panel * wide + lane}
            return self._into(panel, k, lane, self.element(column, start + k, self.y))

        def full(k: Any, p: Any) -> Any:
            return lanes(wide, lambda j: from_y(p, k, j))

        if runs_along(self.y, self.column):
            copy = loop("k", depth, lambda k: loop("panel", whole, lambda p: full(k, p)))
        else:
            copy = loop("panel", whole, lambda p: loop("k", depth, lambda k: full(k, p)))
        if isinstance(rest, int) and rest == 0:
            return copy

        def last(k: Any) -> Any:
            own = loop("lane", rest, lambda j: from_y(whole, k, j))
            more = loop("lane", wide - rest, lambda j: self._into(whole, k, j + rest, self.zero))
            return tirx.SeqStmt([own, more])

        tail = loop("k", depth, last)
        if not isinstance(rest, int):
            tail = tirx.IfThenElse(number(0) < rest, tail, None)
        return tirx.SeqStmt([copy, tail])

    def _place(self, panel: Any, k: Any, lane: Any) -> Any:
        return (panel * self.tiles.depth + k) * self.tiles.lanes + lane

    def _into(self, panel: Any, k: Any, lane: Any, value: Any) -> Any:
        return tirx.BufferStore(self.packed, value, [self._place(panel, k, lane)])

    def _into_line(self, value: Any, place: Any) -> Any:
        return tirx.BufferStore(self.line, value, [place])

    def _by_line(self, first: Any, count: Any, panels: Any, start: Any, k: Any) -> Any:
        """One element of `k` for all columns: copied as they lie in memory, then into panels."""
        wide = self.tiles.lanes

        def panel(p: Any) -> Any:
            read = self.line
            return lanes(wide, lambda j: self._into(p, k, j, tirx.BufferLoad(read, [p * wide + j])))

        if self.lines is None:
            fill = self._fill({}, first, count, 0, start + k)
        else:
            var, width = self.lines.var, self.width
            fill = loop(
                "line",
                count,
                lambda y: self._fill({var: first + y}, 0, width, y * width, start + k),
            )
        return tirx.SeqStmt([fill, loop("panel", panels, panel)])

    def _fill(self, at: dict[Any, Any], first: Any, count: Any, place: Any, k: Any) -> Any:
        """Copy elements that lie in one line of the input, zeros where it ends."""
        y, conditions = split_guard(self.y, self.column)

        def copied(j: Any) -> Any:
            return self._into_line(self.element({**at, self.column: first + j}, k, y), place + j)

        def zeros(begin: Any, end: Any) -> Any:
            return loop(
                "column", end - begin, lambda j: self._into_line(self.zero, place + begin + j)
            )

        if self.window is None or y is self.y:
            y = self.y
            return vectors(count, copied)
        taps, stride, before, step = self.window
        offset = tirx.floormod(k, number(taps)) * step - before
        length = list(last_load(y).source.shape)[-1]
        begin, end = tirx.Var("begin", INDEX), tirx.Var("end", INDEX)
        low = quotient(number(0) - offset + (stride - 1), stride) - first
        high = quotient(length - 1 - offset, stride) + 1 - first
        zero, whole = number(0), number(count)
        copy = [
            tirx.Bind(begin, tirx.min(tirx.max(low, zero), whole)),
            tirx.Bind(end, tirx.min(tirx.max(high, begin), whole)),
            zeros(zero, begin),
            vectors(end - begin, lambda j: copied(begin + j)),
            zeros(end, whole),
        ]
        if not conditions:
            return in_turn(copy)
        condition = self.element(at, k, tirx.all(*conditions))
        return tirx.IfThenElse(condition, in_turn(copy), zeros(zero, whole))
