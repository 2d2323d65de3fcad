"""Transposes in vector registers: square tiles are read by rows and written by columns.

The schedule marks a loop along which memory is read, around one along which it is written. Both
become loops over tiles; what does not fill a tile is in one that overlaps the last but one. LLVM
alone writes the elements of such loops one by one, or by scatter instructions that are no faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm.ir.prim import expr_deep_equal

from .tir import Call, NotHandled, Rewriter, Substitute, TensorLoad, counted, is_guard, uses
from .tir import rebuild_for as rebuilt

TRANSPOSE = "fx2relax.transpose"
_BLOCK = 16  # bytes within which a vector instruction moves elements freely
_FEW = 8  # turns of a loop that are no part of a square
_CONFLICT = 1024  # bytes; multiples of it are a few places of a cache
_LARGEST = 100  # nodes of an expression, which is written out for each row of a tile
_BITS = {"bfloat16": "uint16", "float16": "uint16"}
_WIDTHS = {
    **{f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}


def transposed(loop: Any, register: int) -> Any:
    """The loops over tiles for a marked loop; smaller loops where it is no transpose after all.

    Args:
        loop: along what is read, around one along what is written.
        register: how many bytes a vector register has.
    """
    try:
        tiles = _tiles(loop, register)
    except NotHandled:
        tiles = None
    return _in_cache(loop) if tiles is None else tiles.stmt()


def _tiles(loop: Any, register: int) -> _Tiles | None:
    inner = loop.body
    store = inner.body if isinstance(inner, tirx.For) else None
    if not isinstance(store, tirx.BufferStore) or len(store.indices) != 1:
        return None
    if uses(inner.extent, loop.loop_var) or not _zero(loop.min) or not _zero(inner.min):
        return None
    r, c = loop.loop_var, inner.loop_var
    found = _Loads()
    found.expr(store.value)
    if (
        found.guarded
        or found.size > _LARGEST
        or any(x.source.same_as(store.buffer) for x in found.loads)
    ):
        return None
    if _step(store.indices[0], c) != 1 or uses(_difference(store.indices[0], r), r):
        return None
    turned = [x for x in found.loads if _is_turned(x, r, c)]
    if not turned or any(not _among(x, found.certain) for x in turned):
        return None
    widths = [_WIDTHS.get(str(x.source.dtype), 0) for x in turned]
    if 0 in widths:
        return None
    side = min(register // max(widths), 16)
    for extent in (loop.extent, inner.extent):
        while isinstance(extent, tirx.IntImm) and int(extent.value) < side:
            side //= 2
    return _Tiles(loop, inner, store, turned, side) if side >= 4 else None


def _zero(number: Any) -> bool:
    return isinstance(number, tirx.IntImm) and int(number.value) == 0


def _difference(index: Any, var: Any) -> Any:
    """How far apart an index is for two values of a variable that follow on each other."""
    after = Substitute({var: var + tirx.const(1, str(var.ty.dtype))}).expr(index)
    return tvm.sym.Analyzer().simplify(after - index)


def _step(index: Any, var: Any) -> int | None:
    found = _difference(index, var)
    return int(found.value) if isinstance(found, tirx.IntImm) else None


def _is_turned(load: Any, r: Any, c: Any) -> bool:
    """Whether a load is contiguous along the rows and not along the columns."""
    if len(load.indices) != 1 or not uses(load.indices[0], c):
        return False
    if _step(load.indices[0], r) != 1:
        return False
    apart = _difference(load.indices[0], c)
    return not uses(apart, c) and not uses(apart, r) and not _zero(apart)


def _among(load: Any, loads: Sequence[Any]) -> bool:
    return any(_same(load, other) for other in loads)


def _same(a: Any, b: Any) -> bool:
    return bool(a.source.same_as(b.source)) and bool(expr_deep_equal(a.indices[0], b.indices[0]))


class _Loads(Rewriter):
    """The loads of an expression, and which of them are read in any case."""

    def __init__(self) -> None:
        self.loads: list[Any] = []
        self.certain: list[Any] = []
        self.guarded = False
        self.size = 0
        self._branch = 0

    def expr(self, node: Any) -> Any:
        if isinstance(node, tirx.Select):
            self.expr(node.condition)
            self._branch += 1
            self.expr(node.true_value)
            self.expr(node.false_value)
            self._branch -= 1
            return node
        return super().expr(node)

    def leave(self, node: Any) -> Any:
        self.size += 1
        self.guarded = self.guarded or is_guard(node)
        if isinstance(node, TensorLoad):
            self.loads.append(node)
            if not self._branch:
                self.certain.append(node)
        return node


class _Replace(Rewriter):
    """Reads a tile's row in the place of a transposed load."""

    def __init__(self, rows: list[tuple[Any, Any]]) -> None:
        self.rows = rows

    def expr(self, node: Any) -> Any:
        if isinstance(node, Call) and getattr(node.op, "name", "") == "tirx.reinterpret":
            row = self.row(node.args[0])
            if row is not None and str(row.ty.dtype) == str(node.ty.dtype):
                return row
        row = self.row(node)
        if row is None:
            return super().expr(node)
        kind = str(node.ty.dtype)
        return row if str(row.ty.dtype) == kind else tirx.reinterpret(kind, row)

    def row(self, node: Any) -> Any:
        if not isinstance(node, TensorLoad):
            return None
        return next((row for load, row in self.rows if _same(load, node)), None)


class _Tiles:
    """The loops of one transpose in tiles of `side` by `side`."""

    def __init__(self, loop: Any, inner: Any, store: Any, turned: list[Any], side: int) -> None:
        self.loop, self.inner, self.store, self.side = loop, inner, store, side
        self.loads: list[Any] = []
        for load in turned:
            if not _among(load, self.loads):
                self.loads.append(load)
        self.dtype = loop.loop_var.ty.dtype
        zero, one = (tirx.const(n, self.dtype) for n in (0, 1))
        self.lanes = tirx.Ramp(zero, one, side)

    def stmt(self) -> Any:
        """The loops over tiles; as it was where a size turns out to be less than a tile's."""
        known, enough = True, []
        for extent in (self.loop.extent, self.inner.extent):
            if not isinstance(extent, tirx.IntImm):
                known = False
                enough.append(extent >= tirx.const(self.side, extent.ty.dtype))
        tiles = self.all_tiles()
        if known:
            return tiles
        return tirx.IfThenElse(tirx.all(*enough), tiles, _in_cache(self.loop))

    def all_tiles(self) -> Any:
        """The loops over tiles.

        Inside, they run along what is read: its rows are used up line by line. Not where the rows
        that are written lie so far apart that all share a few places of the first-level cache.
        """
        loops = [self.loop, self.inner]
        apart = _step(self.store.indices[0], self.loop.loop_var)
        width = _WIDTHS.get(str(self.store.buffer.dtype), 1)
        if apart is not None and apart * width % _CONFLICT:
            loops.reverse()
        outer, inner = loops

        def outside(i: Any) -> Any:
            return counted("tile", self.dtype, self.parts(inner.extent), lambda j: inside(i, j))

        def inside(i: Any, j: Any) -> Any:
            at = {outer: self.first(i, outer.extent), inner: self.first(j, inner.extent)}
            return self.tile(at[self.loop], at[self.inner])

        return counted("tile", self.dtype, self.parts(outer.extent), outside, self.loop.kind)

    def parts(self, extent: Any) -> Any:
        side = tirx.const(self.side, self.dtype)
        return tirx.floordiv(extent + (side - 1), side)

    def first(self, turn: Any, extent: Any) -> Any:
        at = turn * tirx.const(self.side, self.dtype)
        if isinstance(extent, tirx.IntImm) and int(extent.value) % self.side == 0:
            return at
        return tirx.min(at, extent - tirx.const(self.side, self.dtype))

    def tile(self, r: Any, c: Any) -> Any:
        """One tile that begins at a row and a column."""
        stmts: list[Any] = []
        rows = [self.turn(load, r, c, stmts) for load in self.loads]
        for k in range(self.side):
            stmts.append(self.row(k, r, c, [row[k] for row in rows]))
        return tirx.SeqStmt(stmts)

    def turn(self, load: Any, r: Any, c: Any, stmts: list[Any]) -> list[Any]:
        """Read a tile and turn it in registers; its rows in memory that LLVM makes registers of."""
        side = self.side
        kind = _BITS.get(str(load.source.dtype), str(load.source.dtype))
        vectors = []
        for k in range(side):
            at = {self.loop.loop_var: r, self.inner.loop_var: c + tirx.const(k, self.dtype)}
            index = Substitute(at).expr(load.indices[0])
            one = tirx.const(1, index.ty.dtype)
            value = tirx.BufferLoad(load.source, [tirx.Ramp(index, one, side)])
            if str(load.source.dtype) != kind:
                value = tirx.reinterpret(f"{kind}x{side}", value)
            vectors.append(self.kept(value, kind, stmts))
        for first, second in _network(side, _BLOCK // _WIDTHS[kind]):
            old = vectors
            vectors = [
                self.kept(self.shuffled(old[a], old[b], lanes), kind, stmts)
                for (a, b), lanes in zip(first, second, strict=True)
            ]
        return vectors

    def shuffled(self, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        whole = [tirx.BufferLoad(buffer, [self.lanes]) for buffer in (a, b)]
        return tirx.Shuffle(whole, [tirx.const(n, "int32") for n in lanes])

    def kept(self, vector: Any, kind: str, stmts: list[Any]) -> Any:
        """A vector in memory: TVM's simplifier would write a variable's value out at each use."""
        buffer = tirx.decl_buffer((self.side,), kind, "turned")
        stmts += [tirx.AllocBuffer(buffer), tirx.BufferStore(buffer, vector, [self.lanes])]
        return buffer

    def row(self, k: int, r: Any, c: Any, rows: list[Any]) -> Any:
        """Write a row of the tile."""

        def lane(j: Any) -> Any:
            at = {self.loop.loop_var: r + tirx.const(k, self.dtype), self.inner.loop_var: c + j}
            pairs = zip(self.loads, rows, strict=True)
            reads = _Replace([(load, tirx.BufferLoad(row, [j])) for load, row in pairs])
            value = Substitute(at).expr(reads.expr(self.store.value))
            return tirx.BufferStore(
                self.store.buffer, value, [Substitute(at).expr(self.store.indices[0])]
            )

        return counted("lane", self.dtype, self.side, lane, tirx.ForKind.VECTORIZED)


_Stage = tuple[list[tuple[int, int]], list[list[int]]]


def _network(side: int, block: int) -> list[_Stage]:
    """The stages that turn a square: for each vector of the next, which two, and their lanes.

    First blocks of 16 bytes are turned among as many vectors, then the blocks; each step is one
    instruction of AVX, AVX-512 or NEON.
    """
    block = min(block, side)
    blocks = side // block
    stages: list[_Stage] = []
    step = block
    while step > 1:
        pairs, lanes = [], []
        for group in range(blocks):
            for k in range(block):
                one = group * block + k // 2
                pairs.append((one, one + block // 2))
                lanes.append(_interleaved(side, block, upper=k % 2 == 1))
        stages.append((pairs, lanes))
        step //= 2
    if blocks == 1:
        return stages
    # Vector ``group * block + k`` has, block by block, columns ``k``, ``block + k``, ...
    if blocks == 4:
        pairs, lanes = [], []
        for group in range(4):
            for k in range(block):
                one = (group // 2) * 2 * block + k
                pairs.append((one, one + block))
                half = group % 2 * 2
                lanes.append(_blocks(block, [half, half + 1, 4 + half, 5 + half]))
        stages.append((pairs, lanes))
    pairs, lanes = [], []
    for group in range(blocks):
        for k in range(block):
            if blocks == 2:
                pairs.append((k, block + k))
                lanes.append(_blocks(block, [group, 2 + group]))
            else:
                one = group // 2 * block + k
                pairs.append((one, one + 2 * block))
                odd = group % 2
                lanes.append(_blocks(block, [odd, 2 + odd, 4 + odd, 6 + odd]))
    stages.append((pairs, lanes))
    return stages


def _interleaved(side: int, block: int, upper: bool) -> list[int]:
    """Half of each block of two vectors, element by element in turn."""
    found = []
    for start in range(0, side, block):
        first = start + (block // 2 if upper else 0)
        for n in range(block // 2):
            found += [first + n, side + first + n]
    return found


def _blocks(block: int, chosen: Sequence[int]) -> list[int]:
    return [b * block + n for b in chosen for n in range(block)]


def _in_cache(loop: Any) -> Any:
    """The loops in square parts, so that each line of cache is read once."""
    inner = loop.body
    if not isinstance(inner, tirx.For):
        return rebuilt(loop, loop.extent, inner, marked=False)
    sizes = [e for e in (loop.extent, inner.extent) if isinstance(e, tirx.IntImm)]
    few = any(int(size.value) < _FEW for size in sizes)
    if few or uses(inner.extent, loop.loop_var):
        return rebuilt(loop, loop.extent, inner, marked=False)
    dtype, side = loop.loop_var.ty.dtype, tirx.const(16, loop.loop_var.ty.dtype)

    def part(outer: Any, at: Any, body: Any) -> Any:
        return counted("part", dtype, tirx.min(side, outer.extent - at), body)

    def rows(i: Any) -> Any:
        def columns(j: Any) -> Any:
            def row(k: Any) -> Any:
                def one(m: Any) -> Any:
                    values = {loop.loop_var: i * side + k, inner.loop_var: j * side + m}
                    return Substitute(values).stmt(inner.body)

                return part(inner, j * side, one)

            return part(loop, i * side, row)

        return counted("tile", dtype, tirx.floordiv(inner.extent + (side - 1), side), columns)

    count = tirx.floordiv(loop.extent + (side - 1), side)
    return counted("tile", dtype, count, rows, loop.kind)
