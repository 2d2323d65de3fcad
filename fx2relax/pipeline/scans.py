"""Scans along one axis, of several rows at once.

A converter writes a scan as a loop over rows, each of which goes from element to element. Each step
waits for the one before it, and where the axis is not the last, reads another line of cache. Here
neighbouring rows take each step together, in vectors, and in the same order as alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import tirx
from tvm.ir.prim import expr_deep_equal

from .loops import worth
from .tir import NotHandled, Rewriter, Substitute, TensorLoad, counted, length_of
from .tir import rebuild_for as rebuilt
from .transposes import TRANSPOSE

#: Marks the loop over rows; its value is how many rows lie side by side.
SCAN = "fx2relax.scan"
_VECTOR = 16  # rows of a vector
_VECTORS = 4  # of rows that lie side by side: what the machine fetches ahead
_TURNS = 8  # of a loop over groups that several threads share
_NODES = 8  # that take as long as a step of any other kernel
_THREADS = 2  # as few as there may be


def scanned(loop: Any) -> Any:
    """The loop over rows as one over groups of them."""
    try:
        return _Scan(loop).stmt()
    except NotHandled:
        return rebuilt(loop, loop.extent, loop.body, marked=False)


class _Scan:
    """The parts of one scan.

    Args:
        loop: over rows. Its statements make variables of one element, set them, and walk the axis.
    """

    def __init__(self, loop: Any) -> None:
        self.loop, self.row = loop, loop.loop_var
        self.dtype = self.row.ty.dtype
        self.beside = int(loop.annotations[SCAN])
        body = loop.body
        *self.first, self.walk = list(body) if isinstance(body, tirx.SeqStmt) else [body]
        if not isinstance(self.walk, tirx.For):
            raise NotHandled("scan")
        self.kind = loop.kind
        rows, steps = length_of(loop.extent), length_of(self.walk.extent)
        if rows is not None and steps is not None:
            work = rows * steps * _size(self.walk.body) / _NODES
            if not worth(work, _THREADS):
                self.kind = tirx.ForKind.SERIAL

    def stmt(self) -> Any:
        if self.beside > 1:
            return self.columns()
        return self.rows()

    def number(self, value: int) -> Any:
        return tirx.const(value, self.dtype)

    def columns(self) -> Any:
        """Rows that lie side by side, as many as there are lines of cache to be read at once."""
        beside = self.beside
        size = min(_VECTOR * _VECTORS, beside)
        rows = length_of(self.loop.extent)
        while rows is not None and size > _VECTOR and rows // size < _TURNS:
            size = max(size // 2, _VECTOR)
        whole, rest = divmod(beside, size)
        groups = whole + (rest > 0)
        before, group = (tirx.Var(name, self.dtype) for name in ("before", "group"))
        bounds = tvm.sym.Analyzer()
        bounds.bind(group, tvm.ir.Range(self.number(0), self.number(max(whole, 1))))
        start = before * self.number(beside)
        several = self.together(start + group * self.number(size), size, bounds)
        if rest:
            last = self.together(start + self.number(whole * size), rest, bounds)
            several = tirx.IfThenElse(group < self.number(whole), several, last)
        extent = tirx.floordiv(self.loop.extent, self.number(beside)) * self.number(groups)

        def turn(i: Any) -> Any:
            places = {
                before: tirx.floordiv(i, self.number(groups)),
                group: tirx.floormod(i, self.number(groups)),
            }
            return Substitute(places).stmt(several)

        extent = tvm.sym.Analyzer().simplify(extent)
        return counted("group", self.dtype, extent, turn, self.kind)

    def rows(self) -> Any:
        """Rows that follow on each other in memory."""
        rows = self.loop.extent
        size = self.number(_VECTOR)
        length = length_of(rows)
        if length is not None and length < _VECTOR:  # several threads still share them
            return rebuilt(self.loop, rows, self.loop.body, self.kind, marked=False)

        def turn(i: Any) -> Any:
            several = self.tiled(i * size)
            if length is not None and length % _VECTOR == 0:
                return several

            def one(j: Any) -> Any:
                return Substitute({self.row: i * size + j}).stmt(self.loop.body)

            rest = counted("row", self.dtype, rows - i * size, one)
            return tirx.IfThenElse((i + self.number(1)) * size <= rows, several, rest)

        groups = tvm.sym.Analyzer().simplify(tirx.floordiv(rows + self.number(_VECTOR - 1), size))
        return counted("group", self.dtype, groups, turn, self.kind)

    def together(self, start: Any, count: int, bounds: Any) -> Any:
        """The statements of so many rows, the first of which is given."""
        several = _Several(self.row, start, count, bounds)
        return tirx.SeqStmt([several.stmt(s) for s in [*self.first, self.walk]])

    def tiled(self, start: Any) -> Any:
        """The statements of a vector's rows, the first of which is given.

        Each row's elements lie side by side, so that as many of them as rows are turned in
        registers before and after their steps.
        """
        several = _Tiled(self.row, start, self.walk)
        first = [several.stmt(s) for s in self.first]
        size = self.number(_VECTOR)
        extent = self.walk.extent
        whole = tirx.floordiv(extent, size)
        squares = counted("square", self.dtype, whole, lambda i: several.square(i * size))
        stmts = [*first, *several.made(), squares]
        steps = length_of(extent)
        if steps is None or steps % _VECTOR:
            rest, done = extent - whole * size, whole * size
            stmts.append(counted("rest", self.dtype, rest, lambda j: several.rest(done + j)))
        return tirx.SeqStmt(stmts)


def _size(node: Any) -> int:
    """How many expressions a statement is made of."""
    count = _Count()
    count.stmt(node)
    return count.nodes


class _Count(Rewriter):
    def __init__(self) -> None:
        self.nodes = 0

    def leave(self, node: Any) -> Any:
        self.nodes += 1
        return node


class _Several(Rewriter):
    """Statements of one row as those of several."""

    def __init__(self, row: Any, start: Any, count: int, bounds: Any) -> None:
        self.row, self.start, self.bounds = row, start, bounds
        self.dtype = row.ty.dtype
        self.pieces = _pieces(count)
        self.count = count
        self.own: dict[Any, Any] = {}
        self.lane: Any = None

    def visit_AllocBuffer(self, node: Any) -> Any:
        old = node.buffer
        if len(old.shape) != 1 or length_of(old.shape[0]) != 1:
            raise NotHandled("scan")
        self.own[old] = tirx.decl_buffer((self.count,), old.dtype, old.name)
        return tirx.AllocBuffer(self.own[old])

    def visit_BufferStore(self, node: Any) -> Any:
        stmts = [
            counted("lane", self.dtype, lanes, self._row(node, at, lanes), kind)
            for at, lanes, kind in self.pieces
        ]
        return stmts[0] if len(stmts) == 1 else tirx.SeqStmt(stmts)

    def _row(self, node: Any, at: int, lanes: int) -> Callable[[Any], Any]:
        return lambda turn: self.one(node, turn, at, lanes)

    def one(self, node: Any, turn: Any, at: int, lanes: int) -> Any:
        """The statement of one row: of a turn of the vector that begins at a row."""
        zero = tirx.const(0, self.dtype)
        self.bounds.bind(turn, tvm.ir.Range(zero, tirx.const(lanes, self.dtype)))
        self.lane = turn + tirx.const(at, self.dtype)
        value = self.expr(node.value)
        buffer, indices = self.place(node.buffer, [self.expr(i) for i in node.indices])
        return tirx.BufferStore(buffer, value, indices)

    def place(self, buffer: Any, indices: list[Any]) -> tuple[Any, list[Any]]:
        own = self.own.get(buffer)
        if own is not None:
            return own, [self.lane]
        return buffer, [self.bounds.simplify(i) for i in indices]

    def leave(self, node: Any) -> Any:
        if isinstance(node, TensorLoad):
            return tirx.BufferLoad(*self.place(node.source, list(node.indices)))
        if isinstance(node, tvm.ir.Var) and node.same_as(self.row):
            return self.start + self.lane
        return node


class _Tiled(_Several):
    """The same for rows that follow on each other, a square of elements at a time.

    Args:
        walk: the loop along the axis.
    """

    def __init__(self, row: Any, start: Any, walk: Any) -> None:
        super().__init__(row, start, _VECTOR, tvm.sym.Analyzer())
        self.walk = walk
        self.read: dict[Any, tuple[Any, Any]] = {}  # of a buffer, its square and its index
        self.written: dict[Any, tuple[Any, Any]] = {}
        self.place_in_walk: Any = None
        self.step: Any = None

    def made(self) -> list[Any]:
        """The memory of the squares."""
        return [tirx.AllocBuffer(tile) for tile, _ in (*self.read.values(), *self.written.values())]

    def square(self, first: Any) -> Any:
        """As many steps as there are rows, from one on."""

        def turn(step: Any) -> Any:
            self.step, self.place_in_walk = step, first + step
            return self.stmt(self.walk.body)

        steps = counted("step", self.dtype, self.count, turn)
        self.step = None
        before = [self.turned(first, b, *square) for b, square in self.read.items()]
        after = [self.turned(first, b, *square, back=True) for b, square in self.written.items()]
        return tirx.SeqStmt([*before, steps, *after])

    def rest(self, first: Any) -> Any:
        """One step more, which reads and writes elements of all rows."""
        self.place_in_walk = first
        return self.stmt(self.walk.body)

    def turned(self, first: Any, buffer: Any, tile: Any, index: Any, back: bool = False) -> Any:
        """A square copied in or out; the marked loop is along what is read."""

        def copy(row: Any, step: Any) -> Any:
            places = {self.row: self.start + row, self.walk.loop_var: first + step}
            outside, inside = Substitute(places).expr(index), step * self.number(_VECTOR) + row
            if back:
                return tirx.BufferStore(buffer, tirx.BufferLoad(tile, [inside]), [outside])
            return tirx.BufferStore(tile, tirx.BufferLoad(buffer, [outside]), [inside])

        count, serial = self.number(_VECTOR), tirx.ForKind.SERIAL
        row, step = (tirx.Var(name, self.dtype) for name in ("row", "step"))
        outer, inner = (row, step) if back else (step, row)
        zero = self.number(0)
        along = tirx.For(inner, zero, count, serial, copy(row, step))
        return tirx.For(outer, zero, count, serial, along, None, {TRANSPOSE: 1})

    def number(self, value: int) -> Any:
        return tirx.const(value, self.dtype)

    def expr(self, node: Any) -> Any:
        if isinstance(node, TensorLoad) and self.step is not None and node.source not in self.own:
            return tirx.BufferLoad(*self.tile(self.read, node.source, list(node.indices)))
        return super().expr(node)

    def one(self, node: Any, turn: Any, at: int, lanes: int) -> Any:
        made = super().one(node, turn, at, lanes)
        if self.step is None or node.buffer in self.own:
            return made
        buffer, indices = self.tile(self.written, node.buffer, list(node.indices))
        return tirx.BufferStore(buffer, made.value, indices)

    def tile(self, kind: dict[Any, tuple[Any, Any]], buffer: Any, indices: list[Any]) -> Any:
        """The element of a square that stands for one of a buffer."""
        if len(indices) != 1 or (buffer in self.read and buffer in self.written):
            raise NotHandled("scan")
        if buffer not in kind:
            made = tirx.decl_buffer((_VECTOR * _VECTOR,), buffer.dtype, "square")
            kind[buffer] = made, indices[0]
        tile, index = kind[buffer]
        if not expr_deep_equal(index, indices[0]):
            raise NotHandled("scan")
        return tile, [self.step * self.number(_VECTOR) + self.lane]

    def leave(self, node: Any) -> Any:
        if isinstance(node, tvm.ir.Var) and node.same_as(self.walk.loop_var):
            return self.place_in_walk
        return super().leave(node)


def _pieces(count: int) -> list[tuple[int, int, Any]]:
    """Where vectors of so many rows begin, their lengths, and the kinds of their loops."""
    pieces, at, lanes = [], 0, _VECTOR
    while at < count:
        while count - at < lanes:
            lanes //= 2
        kind = tirx.ForKind.VECTORIZED if lanes > 1 else tirx.ForKind.SERIAL
        pieces.append((at, lanes, kind))
        at += lanes
    return pieces
