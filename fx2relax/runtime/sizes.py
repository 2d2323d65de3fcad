"""Symbols that no argument shows by itself, found from the sizes that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from fx2relax.compat import tvm_ffi
from fx2relax.params import InputSpec


class Solver:
    """Finds each symbol from one size that is linear in it (``2*s0 + 1``)."""

    def __init__(self, symbols: Sequence[sympy.Symbol], params: Sequence[InputSpec]) -> None:
        self._rules = [self._rule(symbol, params) for symbol in symbols]

    @staticmethod
    def _rule(
        symbol: sympy.Symbol, params: Sequence[InputSpec]
    ) -> tuple[int, int | None, int, int]:
        for spec in params:
            if spec.position < 0:
                continue
            tensor = isinstance(spec.val, torch.Tensor)
            sizes = list(spec.val.shape) if tensor else [spec.val]
            for axis, size in enumerate(sizes):
                if not isinstance(size, torch.SymInt):
                    continue
                expr = sympy.expand(size.node.expr)
                slope = expr.coeff(symbol, 1)
                rest = sympy.simplify(expr - slope * symbol)
                if slope.is_Integer and slope != 0 and rest.is_Integer:
                    return spec.position, axis if tensor else None, int(slope), int(rest)
        raise ValueError(f"the size {symbol} cannot be found from the sizes of the arguments")

    def solve(self, arguments: Sequence[Any]) -> Any:
        """The symbols' values, in order, as a TVM shape."""
        values = []
        for position, axis, slope, rest in self._rules:
            given = arguments[position]
            size = int(given if axis is None else given.shape[axis])
            values.append((size - rest) // slope)
        return tvm_ffi.Shape(tuple(values))
