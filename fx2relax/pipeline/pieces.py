"""Vector loops cut where what they compute changes, as at the seam of two joined tensors.

An element that asks where it comes from (`j < 32 ? a[j] : b[j - 32]`) is computed by itself: TVM
makes scalars of a vector with a condition in it. Between two seams all elements have one answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import tvm
from tvm import tirx

from .tir import Rewriter, Substitute, TensorLoad, is_guard, length_of, uses
from .vector import VECTOR

_MOST = 16  # cuts of a loop; each makes its code once more
#: Comparisons, turned so that 0 stands on the right, and what they say of the left.
_SIGNS = {tirx.LT: (1, 0), tirx.LE: (1, 1), tirx.GT: (-1, 0), tirx.GE: (-1, 1)}


class Pieces(Rewriter):
    """Rewrites the marked loops of a lowered kernel."""

    def visit_For(self, node: Any) -> Any:
        """A marked loop in pieces, which are marked as it is."""
        if VECTOR not in node.annotations or not isinstance(node.body, tirx.BufferStore):
            return self.default(node)
        length = length_of(node.extent)
        if length is None or length_of(node.min) != 0:
            return node
        seams = _Seams(node.loop_var)
        seams.stmt(node.body)
        cuts = sorted(c for c in seams.found if 0 < c < length)
        if not cuts or len(cuts) > _MOST:
            return node
        pieces = [_piece(node, *ends) for ends in pairwise([0, *cuts, length])]
        return tirx.SeqStmt([self.visit_For(piece) for piece in pieces])


def _piece(loop: Any, start: int, stop: int) -> Any:
    """Some turns of a loop."""
    dtype = loop.loop_var.ty.dtype
    var = tirx.Var(loop.loop_var.name, dtype)
    body = _Decided(loop.loop_var, start, stop).stmt(loop.body)
    body = _Simpler().stmt(Substitute({loop.loop_var: var + start}).stmt(body))
    turns = tirx.const(stop - start, dtype)
    return tirx.For(var, loop.min, turns, loop.kind, body, None, loop.annotations)


class _Seams(Rewriter):
    """The numbers of turns at which a condition of an element begins to hold, or ends to."""

    def __init__(self, var: Any) -> None:
        self._var = var
        self.found: set[int] = set()

    def leave(self, node: Any) -> Any:
        condition = _condition(node)
        if condition is not None:
            for comparison in _comparisons(condition):
                at = _seam(comparison, self._var)
                self.found |= set() if at is None else {at}
        return node


class _Decided(Rewriter):
    """Elements without the conditions that hold, or do not, in all turns from one to another."""

    def __init__(self, var: Any, start: int, stop: int) -> None:
        self._var, self._start, self._stop = var, start, stop

    def leave(self, node: Any) -> Any:
        condition = _condition(node)
        if condition is None:
            return node
        holds = self._left(condition)
        yes, no = node.args[1:] if is_guard(node) else (node.true_value, node.false_value)
        if isinstance(holds, bool):
            return yes if holds else no
        if holds is condition:
            return node
        return (tirx.if_then_else if is_guard(node) else tirx.Select)(holds, yes, no)

    def _left(self, condition: Any) -> Any:
        """Whether a condition holds in all turns; else what is left to be asked."""
        if isinstance(condition, (tirx.And, tirx.Or)):
            both = isinstance(condition, tirx.And)
            a, b = self._left(condition.a), self._left(condition.b)
            for one, other in ((a, b), (b, a)):
                if isinstance(one, bool):
                    return other if one is both else one
            same = a is condition.a and b is condition.b
            return condition if same else type(condition)(a, b)
        if isinstance(condition, tirx.Not):
            inner = self._left(condition.a)
            if isinstance(inner, bool):
                return not inner
            return condition if inner is condition.a else tirx.Not(inner)
        seam = _seam(condition, self._var)
        # One may be inside still: what an inner condition has made of this one was not cut at.
        if seam is None or self._start < seam < self._stop:
            return condition
        at = Substitute({self._var: tirx.const(self._start, self._var.ty.dtype)}).expr(condition)
        return bool(int(tvm.sym.Analyzer().simplify(at).value))


class _Simpler(Rewriter):
    """Shorter indices, so that a vector of them is seen to be one."""

    def leave(self, node: Any) -> Any:
        if isinstance(node, TensorLoad):
            simple = tvm.sym.Analyzer().simplify
            return tirx.BufferLoad(node.source, [simple(i) for i in node.indices])
        return node


def _condition(node: Any) -> Any:
    """What a choice between two values depends on; None for all else."""
    if is_guard(node):
        return node.args[0]
    return node.condition if isinstance(node, tirx.Select) else None


def _comparisons(condition: Any) -> Iterator[Any]:
    if isinstance(condition, (tirx.And, tirx.Or)):
        yield from _comparisons(condition.a)
        yield from _comparisons(condition.b)
    elif isinstance(condition, tirx.Not):
        yield from _comparisons(condition.a)
    else:
        yield condition


def _seam(comparison: Any, var: Any) -> int | None:
    """The turn at which a comparison of a loop's number with a constant changes; else None."""
    if type(comparison) not in _SIGNS or not uses(comparison, var):
        return None
    sign, equal = _SIGNS[type(comparison)]
    difference = sign * (comparison.a - comparison.b)  # below 0, or at most 0, where it holds
    analyzer = tvm.sym.Analyzer()
    up, down = analyzer.simplify(difference - var), analyzer.simplify(difference + var)
    if isinstance(up, tirx.IntImm):  # var + up
        return equal - int(up.value)
    if isinstance(down, tirx.IntImm):  # down - var
        return int(down.value) + 1 - equal
    return None
