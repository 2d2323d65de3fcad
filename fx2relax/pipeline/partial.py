"""Running sums, products and extremes as several vectors of partial results."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.ir.prim import expr_deep_equal

from .cascade import JOINS, Parts, identity
from .tir import Call, Substitute, TensorLoad, counted, length_of, rebuild_for, uses

_ACCUMULATORS = 4
_REDUCERS: dict[Any, Any] = {
    **JOINS,
    # Truths are added up as numbers, 1 for each that decides: no vector register holds bits.
    tirx.And: lambda a, b: a | b,
    tirx.Or: lambda a, b: a | b,
}


def _identity(kind: Any, dtype: str) -> Any:
    return tirx.const(0, dtype) if kind in (tirx.And, tirx.Or) else identity(kind, dtype)


def _same_place(load: Any, store: Any) -> bool:
    return (
        isinstance(load, TensorLoad)
        and load.source.same_as(store.buffer)
        and all(expr_deep_equal(a, b) for a, b in zip(load.indices, store.indices, strict=True))
    )


def running(store: Any) -> tuple[Any, Any] | None:
    """The kind and the element of `acc = acc op e`, or None."""
    value = store.value
    if type(value) in _REDUCERS:
        return (type(value), value.b) if _same_place(value.a, store) else None
    if not isinstance(value, tirx.Select) or not _same_place(value.true_value, store):
        return None
    # `acc` where it is beyond `e` or NaN; `tirx.Max` and `tirx.Min` keep NaN, see `vectormath`.
    condition, element = value.condition, value.false_value
    if not isinstance(condition, tirx.Or):
        return None
    wins, nan = condition.a, condition.b
    if not isinstance(nan, Call) or getattr(nan.op, "name", "") != "tirx.isnan":
        return None
    if not _same_place(nan.args[0], store) or not isinstance(wins, (tirx.GT, tirx.LT)):
        return None
    first, second = wins.a, wins.b
    larger = isinstance(wins, tirx.GT)
    if not _same_place(first, store):
        first, second, larger = second, first, not larger
    if not _same_place(first, store) or not expr_deep_equal(second, element):
        return None
    return tirx.Max if larger else tirx.Min, element


def reduce_loop(loop: Any, lanes: int) -> Any:
    """Several vectors of partial results, joined at the end, for `acc = acc op e`."""
    plain = rebuild_for(loop, loop.extent, loop.body, marked=False)
    store, var = loop.body, loop.loop_var
    found = running(store) if isinstance(store, tirx.BufferStore) else None
    if found is None or any(uses(i, var) for i in store.indices):
        return plain
    length = length_of(loop.extent)
    if lanes < 2 or (length is not None and length < 2 * lanes):
        return plain
    return tirx.SeqStmt(_Partial(loop, *found, lanes, length).stmts())


class _Partial:
    """The statements of one reduction in `count` vectors of `lanes` partial results."""

    def __init__(self, loop: Any, kind: Any, element: Any, lanes: int, length: int | None):
        self.loop, self.store, self.kind, self.lanes = loop, loop.body, kind, lanes
        self.dtype = loop.loop_var.ty.dtype
        self.length = length
        self.count = _ACCUMULATORS
        while self.length is not None and self.count * lanes > self.length:
            self.count //= 2
        self.combine = _REDUCERS[kind]
        truth = kind in (tirx.And, tirx.Or)
        dtype = "int32" if truth else str(self.store.buffer.dtype)
        if truth:
            decides = tirx.Not(element) if kind is tirx.And else element
            element = tirx.Select(decides, tirx.const(1, dtype), tirx.const(0, dtype))
        self.element = element
        self.identity = _identity(kind, dtype)
        self.kept_as = dtype
        self.part = self.made()

    def stmts(self) -> list[Any]:
        lanes, count, extent, dtype = self.lanes, self.count, self.loop.extent, self.dtype
        step = lanes * count
        done = tirx.floordiv(extent, tirx.const(step, dtype)) * step
        single = tirx.floordiv(extent - done, tirx.const(lanes, dtype))
        stmts = [
            tirx.AllocBuffer(self.part),
            self.clear(self.part),
            *self.chunks(tirx.floordiv(extent, tirx.const(step, dtype)), step),
        ]
        if self.length is None or self.length % step >= lanes:
            stmts.append(
                counted(
                    "chunk",
                    dtype,
                    single,
                    lambda i: self.vectors(
                        1, lambda k: self.add(self.part, k, done + i * lanes + k)
                    ),
                )
            )
        while count > 1:
            count //= 2
            half = count * lanes
            stmts.append(self.vectors(count, lambda k, half=half: self.join(k, k + half)))
        # One lane after another would wait for each sum in turn: 64 cycles for 16 of them.
        while lanes > 1:
            lanes //= 2
            stmts.append(self.halved(lanes))
        stmts.append(self.fold(tirx.const(0, dtype)))
        if self.length is None or self.length % self.lanes:
            start = done + single * self.lanes
            body = self.store
            stmts.append(
                counted(
                    "rest",
                    dtype,
                    extent - start,
                    lambda j: Substitute({self.loop.loop_var: start + j}).stmt(body),
                )
            )
        return stmts

    def chunks(self, extent: Any, step: int) -> list[Any]:
        """All whole groups of vectors."""

        def turn(i: Any, place: Any) -> Any:
            part = self.part if place is None else place
            return self.vectors(self.count, lambda k: self.add(part, k, i * step + k))

        if self.kind is not tirx.Add or not str(self.part.dtype).startswith("float"):
            return [counted("chunk", self.dtype, extent, lambda i: turn(i, None))]
        parts = Parts(self.made, self.clear, self.flush)
        extent = tvm.sym.Analyzer().simplify(extent)
        loop, _ = parts.loop("chunk", extent, self.dtype, turn)
        return [*parts.allocated, loop(None)]

    def made(self) -> Any:
        """Memory for so many vectors."""
        return tirx.decl_buffer((self.count * self.lanes,), self.kept_as, "partial")

    def clear(self, part: Any) -> Any:
        return self.vectors(self.count, lambda k: tirx.BufferStore(part, self.identity, [k]))

    def flush(self, part: Any, place: Any) -> Any:
        place = self.part if place is None else place
        return self.vectors(self.count, lambda k: self.plus(place, k, tirx.BufferLoad(part, [k])))

    def vectors(self, count: int, body: Any) -> Any:
        def one(u: Any) -> Any:
            return counted(
                "lane",
                self.dtype,
                self.lanes,
                lambda j: body(u * self.lanes + j),
                tirx.ForKind.VECTORIZED,
            )

        return counted("acc", self.dtype, count, one, tirx.ForKind.UNROLLED)

    def halved(self, lanes: int) -> Any:
        """The upper of twice as many lanes joined to the lower."""
        kind = tirx.ForKind.VECTORIZED if lanes > 1 else tirx.ForKind.UNROLLED
        return counted("lane", self.dtype, lanes, lambda j: self.join(j, j + lanes), kind)

    def add(self, part: Any, k: Any, at: Any) -> Any:
        return self.plus(part, k, Substitute({self.loop.loop_var: at}).expr(self.element))

    def plus(self, part: Any, k: Any, value: Any) -> Any:
        so_far = tirx.BufferLoad(part, [k])
        return tirx.BufferStore(part, self.combine(so_far, value), [k])

    def join(self, k: Any, other: Any) -> Any:
        return self.plus(self.part, k, self.load(other))

    def fold(self, k: Any) -> Any:
        buffer, indices = self.store.buffer, list(self.store.indices)
        so_far, part = tirx.BufferLoad(buffer, indices), self.load(k)
        if self.kind in (tirx.And, tirx.Or):
            decided = tirx.NE(part, tirx.const(0, "int32"))
            total = self.kind(so_far, tirx.Not(decided) if self.kind is tirx.And else decided)
        else:
            total = self.combine(so_far, part)
        return tirx.BufferStore(buffer, total, indices)

    def load(self, k: Any) -> Any:
        return tirx.BufferLoad(self.part, [k])
