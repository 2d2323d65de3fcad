"""Loops that the schedule marked, as vectors: whole ones first, the rest one by one.

TVM vectorises a loop of known length without a condition inside; it leaves any other scalar, and
its `rfactor` forgets the condition of a split that does not come out even. Here a loop of any
length, known at compile time or not, becomes a vector loop and a scalar tail.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.ir.prim import expr_deep_equal

from .tir import Rewriter, Substitute, TensorLoad, rebuild_for, uses

VECTOR = "fx2relax.vector"
REDUCE = "fx2relax.reduce"
_BYTES = 64  # a vector register of AVX-512; LLVM splits it where they are narrower
_ACCUMULATORS = 4


class Vectorize(Rewriter):
    """Rewrites the marked loops of a lowered kernel."""

    def visit_For(self, node: Any) -> Any:
        """A marked loop, or what is inside any other."""
        if VECTOR in node.annotations:
            return _vector_loop(_absorb_guard(node))
        if REDUCE in node.annotations:
            return _reduce_loop(node)
        body = self.stmt(node.body)
        return node if body is node.body else rebuild_for(node, node.extent, body)


def _absorb_guard(loop: Any) -> Any:
    """`for i in n: if base + i < m: ...` as `for i in min(n, m - base): ...`."""
    body = loop.body
    if not isinstance(body, tirx.IfThenElse) or body.else_case is not None:
        return loop
    cond = body.condition
    if not isinstance(cond, tirx.LT) or uses(cond.b, loop.loop_var):
        return loop
    zero = tirx.const(0, loop.loop_var.ty.dtype)
    base = Substitute({loop.loop_var: zero}).expr(cond.a)
    step = tvm.sym.Analyzer().simplify(cond.a - base - loop.loop_var)
    if not (isinstance(step, tirx.IntImm) and int(step.value) == 0):
        return loop
    limit = tirx.max(tirx.min(loop.extent, tirx.Cast(zero.ty.dtype, cond.b - base)), zero)
    return tirx.For(loop.loop_var, loop.min, limit, loop.kind, body.then_case)


class _Widest(Rewriter):
    """The bytes of the widest element that a statement reads, writes or computes."""

    def __init__(self) -> None:
        self.bytes = 1

    def leave(self, node: Any) -> Any:
        if isinstance(node, TensorLoad):
            self.see(node.source.dtype)
        return node

    def see(self, dtype: Any) -> None:
        bits = tvm.runtime.DataType(str(dtype)).bits
        # Half precision is computed in float32.
        self.bytes = max(self.bytes, 4 if str(dtype) in ("float16", "bfloat16") else bits // 8)

    def visit_BufferStore(self, node: Any) -> Any:
        self.see(node.buffer.dtype)
        self.expr(node.value)
        return node


def _lanes(body: Any) -> int:
    widest = _Widest()
    widest.stmt(body)
    return max(_BYTES // max(widest.bytes, 4), 1)


def _length(extent: Any) -> int | None:
    return int(extent.value) if isinstance(extent, tirx.IntImm) else None


def _loop(name: str, dtype: Any, extent: Any, body: Any, kind: Any = tirx.ForKind.SERIAL) -> Any:
    var = tirx.Var(name, dtype)
    if not isinstance(extent, tvm.ir.Expr):
        extent = tirx.const(extent, dtype)
    return tirx.For(var, tirx.const(0, dtype), extent, kind, body(var))


def _at(body: Any, var: Any, value: Any) -> Any:
    return Substitute({var: value}).stmt(body)


def _vector_loop(loop: Any) -> Any:
    lanes = _lanes(loop.body)
    length = _length(loop.extent)
    var, dtype = loop.loop_var, loop.loop_var.ty.dtype
    if lanes < 2 or (length is not None and length < lanes):
        return rebuild_for(loop, loop.extent, loop.body, marked=False)
    if length is not None and length == lanes:
        return rebuild_for(loop, loop.extent, loop.body, tirx.ForKind.VECTORIZED, marked=False)
    width = tirx.const(lanes, dtype)
    whole = tirx.floordiv(loop.extent, width)

    def inner(i: Any) -> Any:
        return _loop(
            "lane",
            dtype,
            lanes,
            lambda j: _at(loop.body, var, i * width + j),
            tirx.ForKind.VECTORIZED,
        )

    parts = [_loop("chunk", dtype, whole, inner)]
    if length is None or length % lanes:
        rest = loop.extent - whole * width
        parts.append(_loop("rest", dtype, rest, lambda j: _at(loop.body, var, whole * width + j)))
    return tirx.SeqStmt(parts) if len(parts) > 1 else parts[0]


_REDUCERS: dict[Any, Any] = {
    tirx.Add: lambda a, b: a + b,
    tirx.Mul: lambda a, b: a * b,
    tirx.Max: tirx.max,
    tirx.Min: tirx.min,
}


def _identity(kind: Any, dtype: str) -> Any:
    if kind is tirx.Add:
        return tirx.const(0, dtype)
    if kind is tirx.Mul:
        return tirx.const(1, dtype)
    return tirx.min_value(dtype) if kind is tirx.Max else tirx.max_value(dtype)


def _same_place(load: Any, store: Any) -> bool:
    return (
        isinstance(load, TensorLoad)
        and load.source.same_as(store.buffer)
        and all(expr_deep_equal(a, b) for a, b in zip(load.indices, store.indices, strict=True))
    )


def _reduce_loop(loop: Any) -> Any:
    """Several vectors of partial results, joined at the end, for `acc = acc op e`."""
    plain = rebuild_for(loop, loop.extent, loop.body, marked=False)
    store, var = loop.body, loop.loop_var
    if not isinstance(store, tirx.BufferStore) or type(store.value) not in _REDUCERS:
        return plain
    kind, element = type(store.value), store.value.b
    if not _same_place(store.value.a, store) or any(uses(i, var) for i in store.indices):
        return plain
    lanes, length = _lanes(store), _length(loop.extent)
    if lanes < 2 or (length is not None and length < 2 * lanes):
        return plain
    return tirx.SeqStmt(_Partial(loop, kind, element, lanes).stmts())


class _Partial:
    """The statements of one reduction in `count` vectors of `lanes` partial results."""

    def __init__(self, loop: Any, kind: Any, element: Any, lanes: int):
        self.loop, self.store, self.element, self.lanes = loop, loop.body, element, lanes
        self.dtype = loop.loop_var.ty.dtype
        self.length = _length(loop.extent)
        self.count = _ACCUMULATORS
        while self.length is not None and self.count * lanes > self.length:
            self.count //= 2
        self.combine = _REDUCERS[kind]
        buffer = self.store.buffer
        self.identity = _identity(kind, str(buffer.dtype))
        self.part = tirx.decl_buffer((self.count * lanes,), buffer.dtype, "partial")

    def stmts(self) -> list[Any]:
        lanes, count, extent, dtype = self.lanes, self.count, self.loop.extent, self.dtype
        step = lanes * count
        done = tirx.floordiv(extent, tirx.const(step, dtype)) * step
        single = tirx.floordiv(extent - done, tirx.const(lanes, dtype))
        stmts = [
            tirx.AllocBuffer(self.part),
            self.vectors(count, lambda k: tirx.BufferStore(self.part, self.identity, [k])),
            _loop(
                "chunk",
                dtype,
                tirx.floordiv(extent, tirx.const(step, dtype)),
                lambda i: self.vectors(count, lambda k: self.add(k, i * step + k)),
            ),
        ]
        if self.length is None or self.length % step >= lanes:
            stmts.append(
                _loop(
                    "chunk",
                    dtype,
                    single,
                    lambda i: self.vectors(1, lambda k: self.add(k, done + i * lanes + k)),
                )
            )
        while count > 1:
            count //= 2
            half = count * lanes
            stmts.append(self.vectors(count, lambda k, half=half: self.join(k, k + half)))
        stmts.append(_loop("lane", dtype, lanes, self.fold, tirx.ForKind.UNROLLED))
        if self.length is None or self.length % lanes:
            start = done + single * lanes
            body = self.store
            stmts.append(
                _loop(
                    "rest",
                    dtype,
                    extent - start,
                    lambda j: _at(body, self.loop.loop_var, start + j),
                )
            )
        return stmts

    def vectors(self, count: int, body: Any) -> Any:
        def one(u: Any) -> Any:
            return _loop(
                "lane",
                self.dtype,
                self.lanes,
                lambda j: body(u * self.lanes + j),
                tirx.ForKind.VECTORIZED,
            )

        return _loop("acc", self.dtype, count, one, tirx.ForKind.UNROLLED)

    def add(self, k: Any, at: Any) -> Any:
        value = Substitute({self.loop.loop_var: at}).expr(self.element)
        return tirx.BufferStore(self.part, self.combine(self.load(k), value), [k])

    def join(self, k: Any, other: Any) -> Any:
        return tirx.BufferStore(self.part, self.combine(self.load(k), self.load(other)), [k])

    def fold(self, k: Any) -> Any:
        total = self.combine(self.store.value.a, self.load(k))
        return tirx.BufferStore(self.store.buffer, total, list(self.store.indices))

    def load(self, k: Any) -> Any:
        return tirx.BufferLoad(self.part, [k])
