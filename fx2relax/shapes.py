"""Sizes: PyTorch's symbolic expressions as TIR expressions, one `tirx.Var` per symbol."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.utils._sympy import functions as symfn
from torch.utils._sympy.symbol import SymT, symbol_is_type

from fx2relax.compat import Analyzer, Range, const_int, tirx

_FROM_DATA = (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)
Size = Any  # an int or a TIR expression of dtype int64


_LARGEST = 1 << 48
_analyzer: contextvars.ContextVar[Any] = contextvars.ContextVar("fx2relax_analyzer", default=None)


def analyzer() -> Any:
    """What is known of the sizes of the graph that is being imported."""
    return _analyzer.get() or Analyzer()


class SymbolTable:
    """One `tirx.Var` per symbol of PyTorch's ShapeEnv, compound expressions kept.

    Args:
        ranges: what PyTorch's guards make certain of a symbol, by `ShapeEnv.var_to_range`;
            nothing where no guards stand before the call.
    """

    def __init__(self, ranges: Mapping[sympy.Symbol, Any] | None = None) -> None:
        self.vars: dict[sympy.Symbol, Any] = {}
        self.ranges = ranges or {}

    @functools.cached_property
    def analyzer(self) -> Any:
        """What is known of the variables."""
        return Analyzer()

    def var(self, symbol: sympy.Symbol) -> Any:
        """The variable that stands for a symbol, made on first use."""
        if symbol not in self.vars:
            self.bind(symbol, tirx.Var(str(symbol), "int64"))
        return self.vars[symbol]

    def bind(self, symbol: sympy.Symbol, var: Any) -> None:
        """Let a symbol be a variable that the caller made."""
        self.vars[symbol] = var
        # Of a number out of a tensor the range is what the graph has yet to assert.
        known = None if symbol_is_type(symbol, _FROM_DATA) else self.ranges.get(symbol)
        low = _bound(known and known.lower, 0 if symbol.is_nonnegative else -_LARGEST)
        high = _bound(known and known.upper, _LARGEST)
        self.analyzer.bind(var, Range(low, high + 1))

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let `analyzer` be this table's inside a ``with`` block."""
        token = _analyzer.set(self.analyzer)
        try:
            yield
        finally:
            _analyzer.reset(token)

    def size(self, value: Any) -> Size:
        """An int, SymInt or sympy expression as an int or a TIR expression."""
        if isinstance(value, torch.SymInt):
            value = value.node.expr
        if isinstance(value, (bool, int)):
            return int(value)
        if isinstance(value, sympy.Expr):
            return const_int(self.analyzer.simplify(_wide(self._convert(value))))
        return value

    def shape(self, sizes: Sequence[Any]) -> list[Size]:
        """`size` over a shape."""
        return [self.size(s) for s in sizes]

    def condition(self, value: Any) -> Any:
        """A SymBool or sympy relation as a TIR boolean."""
        if isinstance(value, torch.SymBool):
            value = value.node.expr
        return self._convert(value)

    def equal(self, left: Size, right: Size) -> bool:
        """Whether two sizes are provably the same."""
        if isinstance(left, int) and isinstance(right, int):
            return left == right
        return bool(self.analyzer.can_prove_equal(_wide(left), _wide(right)))

    def same_shape(self, left: Sequence[Size], right: Sequence[Size]) -> bool:
        """Whether two shapes are provably the same."""
        return len(left) == len(right) and all(
            self.equal(a, b) for a, b in zip(left, right, strict=True)
        )

    def _convert(self, expr: Any) -> Any:
        if expr.is_Symbol:
            return self.var(expr)
        if expr.is_Integer:
            return tirx.const(int(expr), "int64")
        if expr.is_Float:
            return tirx.const(float(expr), "float64")
        if expr is sympy.true or expr is sympy.false:
            return tirx.const(bool(expr), "bool")
        if isinstance(expr, sympy.Piecewise):
            return self._chosen(expr.args)
        rule = _RULES.get(type(expr))
        if rule is None:
            raise ValueError(f"no TIR expression for the size {expr} ({type(expr).__name__})")
        return rule(*[self._convert(a) for a in expr.args])

    def _chosen(self, pieces: Sequence[Any]) -> Any:
        """The first of some expressions whose condition holds; the last one's always does."""
        (value, condition), *rest = pieces
        if condition == sympy.true or not rest:
            return self._convert(value)
        return tirx.Select(self._convert(condition), self._convert(value), self._chosen(rest))


def _bound(value: Any, otherwise: int) -> int:
    """An end of a range, if it is a number that TVM can reckon with."""
    known = value is not None and value.is_Integer and abs(int(value)) < _LARGEST
    return int(value) if known else otherwise


def _wide(value: Size) -> Any:
    return tirx.const(value, "int64") if isinstance(value, int) else value


def _fold(function: Any) -> Any:
    def apply(*args: Any) -> Any:
        result = args[0]
        for arg in args[1:]:
            result = function(result, arg)
        return result

    return apply


def _power(base: Any, exponent: Any) -> Any:
    count = const_int(exponent)
    if not isinstance(count, int) or count < 0:
        raise ValueError(f"no TIR expression for the power {base}**{exponent}")
    result = tirx.const(1, "int64")
    for _ in range(count):
        result = result * base
    return result


def _ceil_div(a: Any, b: Any) -> Any:
    return tirx.floordiv(a + b - 1, b)


def _whole(rounding: Any, value: Any) -> Any:
    """A float rounded to an int64; an integer as it is."""
    if "float" not in str(value.ty.dtype):
        return value
    return tirx.Cast("int64", rounding(value))


def _table() -> dict[type, Any]:
    table: dict[type, Any] = {
        sympy.Add: _fold(lambda a, b: a + b),
        sympy.Mul: _fold(lambda a, b: a * b),
        sympy.Pow: _power,
        sympy.Mod: tirx.floormod,
        sympy.Max: _fold(tirx.max),
        sympy.Min: _fold(tirx.min),
        sympy.Eq: lambda a, b: a.equal(b),
        sympy.Ne: lambda a, b: tirx.NE(a, b),
        sympy.Lt: lambda a, b: a < b,
        sympy.Le: lambda a, b: a <= b,
        sympy.Gt: lambda a, b: a > b,
        sympy.Ge: lambda a, b: a >= b,
        sympy.And: _fold(tirx.And),
        sympy.Or: _fold(tirx.Or),
        sympy.Not: tirx.Not,
        symfn.FloorDiv: tirx.floordiv,
        symfn.CleanDiv: tirx.floordiv,
        symfn.ToFloat: lambda a: tirx.Cast("float64", a),
        symfn.TruncToInt: lambda a: _whole(tirx.trunc, a),
        symfn.FloorToInt: lambda a: _whole(tirx.floor, a),
        symfn.CeilToInt: lambda a: _whole(tirx.ceil, a),
        symfn.IntTrueDiv: lambda a, b: tirx.Cast("float64", a) / tirx.Cast("float64", b),
        symfn.FloatTrueDiv: lambda a, b: a / b,
        symfn.Mod: tirx.floormod,
        symfn.PythonMod: tirx.floormod,
        symfn.ModularIndexing: lambda base, div, mod: tirx.floormod(tirx.floordiv(base, div), mod),
        symfn.Where: tirx.Select,
    }
    for name, rule in {
        "Max": _fold(tirx.max),
        "Min": _fold(tirx.min),
        "PowByNatural": _power,
        "CeilDiv": _ceil_div,
        "LShift": lambda a, b: a << b,
        "RShift": lambda a, b: a >> b,
    }.items():
        if rule is not None and hasattr(symfn, name):
            table[getattr(symfn, name)] = rule
    return table


_RULES = _table()
