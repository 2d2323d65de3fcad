"""Vector loops whose middle reads memory in a row, and whose ends read it within its borders.

A window at a border reads the border's element again: ``x[min(max(j + tap - 1, 0), 111)]``. TVM
loads a vector of such indices element by element. Where none of them is beyond a border the index
is ``j + tap - 1``, and a vector of it is one load.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx

from .pieces import turns
from .tir import Rewriter, TensorLoad, length_of, uses
from .vector import VECTOR
from .wrapping import Bound, reads_data

_SHORTEST = 4  # turns of a middle that is worth loops of its own


def _is_integer(node: Any) -> bool:
    return str(node.ty.dtype).startswith("int")


#: What there is in a kernel that reads within borders.
BORDERS = {tirx.Min: _is_integer, tirx.Max: _is_integer}


class Interiors(Bound):
    """Rewrites the marked loops of a lowered kernel."""

    def __init__(self) -> None:
        super().__init__()
        self._known = tvm.sym.Analyzer()

    def visit_For(self, node: Any) -> Any:
        """A marked loop in up to three, which are marked as it is."""
        if VECTOR in node.annotations and isinstance(node.body, tirx.BufferStore):
            return self._parts(node)
        around = tvm.ir.Range.from_min_extent(node.min, node.extent)
        self._known.bind(node.loop_var, around, allow_override=True)
        return self.default(node)

    def _parts(self, node: Any) -> Any:
        length = length_of(node.extent)
        if length is None or length_of(node.min) != 0:
            return node
        middle = _Middle(node.loop_var, length, self._known, self.bound)
        whole = node.body
        body = middle.stmt(whole)
        if body is whole or middle.stop - middle.start < _SHORTEST:
            return node
        parts = (
            (whole, 0, middle.start),
            (body, middle.start, middle.stop),
            (whole, middle.stop, length),
        )
        loops = [turns(node, *part, self.bound) for part in parts if part[1] < part[2]]
        return tirx.SeqStmt(loops) if len(loops) > 1 else loops[0]


class _Middle(Rewriter):
    """What a loop computes in the turns that read nothing beyond a border.

    Args:
        var: the loop's.
        length: its turns.
        known: the ranges of the variables of loops around it.
        bound: variables that are bound to values.

    Attributes:
        start: the first of these turns.
        stop: the one after the last.
    """

    def __init__(self, var: Any, length: int, known: Any, bound: set[Any]) -> None:
        self.start, self.stop = 0, length
        self._var, self._known, self._bound = var, known, bound

    def leave(self, node: Any) -> Any:
        if not isinstance(node, TensorLoad):
            return node
        old = list(node.indices)
        indices = [_Borders(self).expr(i) for i in old]
        if all(a is b for a, b in zip(indices, old, strict=True)):
            return node
        return tirx.BufferLoad(node.source, indices)

    def within(self, border: Any) -> Any:
        """What a minimum or maximum is in the middle: its part that grows with the turns."""
        if reads_data(border, self._bound):
            return border
        for grows, stays in ((border.a, border.b), (border.b, border.a)):
            if uses(grows, self._var) and not uses(stays, self._var):
                return grows if self._narrow(type(border), grows, stays) else border
        return border

    def _narrow(self, kind: Any, grows: Any, stays: Any) -> bool:
        """Leave out the turns beyond one border, if it is known which these are."""
        found = tvm.sym.detect_linear_equation(grows, [self._var])
        if not found or not isinstance(found[0], tirx.IntImm) or int(found[0]) <= 0:
            return False
        by, first = int(found[0]), found[1]
        # How far the first turn is inside, for all turns of the loops around.
        inside = self._known.const_int_bound(first - stays)
        if kind is tirx.Max:
            least = int(inside.min_value)
            if least == inside.NEG_INF:
                return False
            self.start = max(self.start, -(least // by))
        else:
            most = int(inside.max_value)
            if most == inside.POS_INF:
                return False
            self.stop = min(self.stop, -most // by + 1)
        return True


class _Borders(Rewriter):
    """Minima and maxima of an index; those inside what it reads are none of it."""

    def __init__(self, middle: _Middle) -> None:
        self._middle = middle

    def expr(self, node: Any) -> Any:
        """Rewrite an expression."""
        return node if isinstance(node, TensorLoad) else super().expr(node)

    def leave(self, node: Any) -> Any:
        return self._middle.within(node) if isinstance(node, (tirx.Min, tirx.Max)) else node
