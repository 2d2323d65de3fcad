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

from .present import always
from .tir import Rewriter, Substitute, TensorLoad, is_guard, length_of, uses
from .vector import VECTOR
from .wrapping import Bound, reads_data

_MOST = 16  # cuts of a loop; each makes its code once more
#: Comparisons, turned so that 0 stands on the right, and what they say of the left.
_SIGNS = {tirx.LT: (1, 0), tirx.LE: (1, 1), tirx.GT: (-1, 0), tirx.GE: (-1, 1)}


#: What there is in a kernel with conditions.
CHOICES = {tirx.Select: always, tvm.ir.Call: is_guard}


class Pieces(Bound):
    """Rewrites the marked loops of a lowered kernel."""

    def visit_For(self, node: Any) -> Any:
        """A marked loop in pieces, which are marked as it is."""
        if VECTOR not in node.annotations or not isinstance(node.body, tirx.BufferStore):
            return self.default(node)
        length = length_of(node.extent)
        if length is None or length_of(node.min) != 0:
            return node
        seams = _Seams(node.loop_var, self.bound)
        seams.stmt(node.body)
        cuts = sorted(c for c in seams.found if 0 < c < length)
        if not cuts or len(cuts) > _MOST:
            return node
        pieces = [_piece(node, seams, *ends) for ends in pairwise([0, *cuts, length])]
        return tirx.SeqStmt([self.visit_For(piece) for piece in pieces])


def _piece(loop: Any, seams: _Seams, start: int, stop: int) -> Any:
    """Some turns of a loop, without the conditions that none of them changes."""
    body = _Decided(seams, start, stop).stmt(loop.body)
    return turns(loop, body, start, stop, seams.bound)


def turns(loop: Any, body: Any, start: int, stop: int, bound: set[Any]) -> Any:
    """Some turns of a marked loop, marked as it is, with what they compute."""
    dtype = loop.loop_var.ty.dtype
    var = tirx.Var(loop.loop_var.name, dtype)
    body = _Simpler(bound).stmt(Substitute({loop.loop_var: var + start}).stmt(body))
    extent = tirx.const(stop - start, dtype)
    return tirx.For(var, loop.min, extent, loop.kind, body, None, loop.annotations)


class _Seams(Bound):
    """The numbers of turns at which a condition of an element begins to hold, or ends to."""

    def __init__(self, var: Any, bound: set[Any]) -> None:
        self._var, self.bound = var, set(bound)
        self.found: set[int] = set()

    def leave(self, node: Any) -> Any:
        condition = _condition(node)
        comparisons = () if condition is None else _comparisons(condition)
        self.found.update(s[0] for s in map(self.seam, comparisons) if s is not None)
        return node

    def seam(self, comparison: Any) -> tuple[int, bool] | None:
        """The turn at which a comparison changes, and whether it holds before; else None.

        It is one of the loop's number with a constant. What a kernel reads may overflow, and NaN
        be among it, of which TVM's simplifier knows nothing.
        """
        if type(comparison) not in _SIGNS or not uses(comparison, self._var):
            return None
        if reads_data(comparison, self.bound):
            return None
        sign, equal = _SIGNS[type(comparison)]
        difference = sign * (comparison.a - comparison.b)  # below 0, or at most 0, where it holds
        simple = tvm.sym.Analyzer().simplify
        up, down = simple(difference - self._var), simple(difference + self._var)
        if isinstance(up, tirx.IntImm):  # var + up
            return equal - int(up.value), True
        if isinstance(down, tirx.IntImm):  # down - var
            return int(down.value) + 1 - equal, False
        return None


class _Decided(Rewriter):
    """Elements without the conditions that hold, or do not, in all turns from one to another."""

    def __init__(self, seams: _Seams, start: int, stop: int) -> None:
        self._seams, self._start, self._stop = seams, start, stop

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
        seam = self._seams.seam(condition)
        # One may be inside still: what an inner condition has made of this one was not cut at.
        if seam is None or self._start < seam[0] < self._stop:
            return condition
        at, before = seam
        return before if self._stop <= at else not before


class _Simpler(Rewriter):
    """Shorter indices, so that a vector of them is seen to be one; not those that are read."""

    def __init__(self, bound: set[Any]) -> None:
        self._bound = bound

    def leave(self, node: Any) -> Any:
        if not isinstance(node, TensorLoad):
            return node
        simple = tvm.sym.Analyzer().simplify
        indices = [i if reads_data(i, self._bound) else simple(i) for i in node.indices]
        return tirx.BufferLoad(node.source, indices)


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
