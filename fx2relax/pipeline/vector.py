"""Loops that the schedule marked, as vectors: whole ones first, the rest one by one.

TVM vectorises a loop of known length without a condition inside; it leaves any other scalar, and
its `rfactor` forgets the condition of a split that does not come out even. Here a loop of any
length, known at compile time or not, becomes a vector loop and a scalar tail.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx

from .bounded import bounded
from .cascade import CASCADE, cascaded
from .partial import reduce_loop, running
from .scans import SCAN, scanned
from .shared_sums import SHARE, shared
from .tiles import registers
from .tir import Rewriter, Substitute, TensorLoad, counted, length_of, rebuild_for, uses
from .transposes import TRANSPOSE, transposed

VECTOR = "fx2relax.vector"
REDUCE = "fx2relax.reduce"
_SHORTEST = 4  # elements of a vector
_BYTES = 64  # a vector register of AVX-512; LLVM splits it where they are narrower


class Vectorize(Rewriter):
    """Rewrites the marked loops of a lowered kernel."""

    def visit_For(self, node: Any) -> Any:
        """A marked loop, or what is inside any other."""
        if SCAN in node.annotations:
            return self.stmt(scanned(node))
        if SHARE in node.annotations:
            return self.stmt(shared(node, running, VECTOR))
        if CASCADE in node.annotations:
            return self.stmt(cascaded(node, running, VECTOR))
        if VECTOR in node.annotations:
            return _vector_loop(_absorb_guard(node))
        if TRANSPOSE in node.annotations:
            return transposed(node, _register())
        if REDUCE in node.annotations:
            store = isinstance(node.body, tirx.BufferStore)
            return reduce_loop(node, _lanes(node.body, node.loop_var) if store else 1)
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
    """The bytes of the widest element that a statement reads or writes along a loop."""

    def __init__(self, var: Any) -> None:
        self.var = var
        self.bytes = 1

    def expr(self, node: Any) -> Any:
        """Rewrite an expression; what is the same for every turn takes no vector."""
        if isinstance(node, TensorLoad) and not any(uses(i, self.var) for i in node.indices):
            return node
        return super().expr(node)

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


def _register() -> int:
    """The bytes of a vector register of the machine that code is generated for."""
    target = tvm.target.Target.current(allow_none=True)
    if target is None:
        return _BYTES
    found = registers(target)
    return 4 * found.lanes // found.vectors


def _lanes(body: Any, var: Any) -> int:
    widest = _Widest(var)
    widest.stmt(body)
    return max(_BYTES // max(widest.bytes, 4), 1)


def _at(body: Any, var: Any, value: Any) -> Any:
    return Substitute({var: value}).stmt(body)


def _vector_loop(loop: Any) -> Any:
    lanes = _lanes(loop.body, loop.loop_var)
    length = length_of(loop.extent)
    var, dtype = loop.loop_var, loop.loop_var.ty.dtype
    if lanes < 2 or (length is not None and length < lanes):
        return rebuild_for(loop, loop.extent, loop.body, marked=False)
    width = tirx.const(lanes, dtype)
    whole = tirx.floordiv(loop.extent, width)
    if length == lanes:
        return _vector(loop, lanes, tirx.const(0, dtype))
    parts = [counted("chunk", dtype, whole, lambda i: _vector(loop, lanes, i * width))]
    if length is None:
        done = whole * width
        rest = loop.extent - done
        parts.append(counted("rest", dtype, rest, lambda j: _at(loop.body, var, done + j)))
    else:
        parts += _rest(loop, lanes // 2, length // lanes * lanes, length)
    return tirx.SeqStmt(parts) if len(parts) > 1 else parts[0]


def _vector(loop: Any, lanes: int, start: Any) -> Any:
    """So many turns of a loop as vectors."""
    dtype = loop.loop_var.ty.dtype

    def at(body: Any, j: Any) -> Any:
        return _at(body, loop.loop_var, start + j)

    found = bounded(loop.body, lanes, dtype, at)
    if found is not None:
        return found
    body = loop.body
    return counted("lane", dtype, lanes, lambda j: at(body, j), tirx.ForKind.VECTORIZED)


def _rest(loop: Any, lanes: int, start: int, stop: int) -> list[Any]:
    """The last turns of a loop: in ever shorter vectors, since rows have a rest each."""
    dtype = loop.loop_var.ty.dtype
    parts = []
    while lanes >= _SHORTEST:
        if stop - start >= lanes:
            parts.append(_vector(loop, lanes, tirx.const(start, dtype)))
            start += lanes
        lanes //= 2
    if start < stop:
        first, rest = tirx.const(start, dtype), tirx.const(stop - start, dtype)
        parts.append(
            counted("rest", dtype, rest, lambda j: _at(loop.body, loop.loop_var, first + j))
        )
    return parts
