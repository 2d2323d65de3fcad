"""Numbers that are neither constants nor tensors: sizes, symbolic floats, `Tensor.item`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
import torch.fx
from torch.utils._sympy import functions as symfn

from fx2relax.bounds import bound, position
from fx2relax.casting import cast, scalar, size_tensor
from fx2relax.compat import ShapeType, op, relax, shape_expr, tirx
from fx2relax.errors import Unsupported
from fx2relax.shapes import SymbolTable

aten = torch.ops.aten

# From the bound that a user gave and the size of the axis to the first index.
_FIRST: dict[Any, Callable[[Any, Any], Any]] = {
    aten.slice.Tensor: lambda start, size: bound(start, size, 0),
    aten.select.int: position,
}

# Facts that PyTorch records while it traces; they compute nothing.
NO_OPERATION = frozenset(
    {
        aten.sym_constrain_range.default,
        aten.sym_constrain_range_for_size.default,
        aten._assert_tensor_metadata.default,
    }
)

_RAISE = 1 << 40  # beyond every index
_BINARY = {
    symfn.FloatTrueDiv: op.divide,
    symfn.IntTrueDiv: op.divide,
    symfn.FloatPow: op.power,
    symfn.PowByNatural: op.power,
    sympy.Pow: op.power,
}
_FOLDS = {sympy.Add: op.add, sympy.Mul: op.multiply, sympy.Max: op.maximum, sympy.Min: op.minimum}
_UNARY = {"sqrt": op.sqrt, "log2": lambda x: op.divide(op.log(x), scalar_log2()), "exp": op.exp}


def scalar_log2() -> Any:
    """The natural logarithm of 2 as a 0-d tensor."""
    return scalar(0.6931471805599453, "float64")


class Scalars:
    """The symbolic numbers of one graph: ints are TIR expressions, floats 0-d float64 tensors."""

    def __init__(self, symbols: SymbolTable, builder: Any) -> None:
        self.symbols = symbols
        self.builder = builder
        self.floats: dict[sympy.Symbol, Any] = {}

    def known(self, val: Any) -> bool:
        """Whether a number follows from what is known already, without running its node."""
        if isinstance(val, (bool, int, float)):
            return True
        return all(
            symbol in self.symbols.vars or symbol in self.floats
            for symbol in val.node.expr.free_symbols
        )

    def value(self, val: Any) -> Any:
        """A known number for the environment."""
        if isinstance(val, torch.SymBool):
            return self.symbols.condition(val)
        if isinstance(val, torch.SymFloat):
            return self.builder.emit(self._float(val.node.expr))
        if isinstance(val, float):
            return val
        return self.symbols.size(val)

    def bind_float(self, val: torch.SymFloat, tensor: Any) -> None:
        """Let a float symbol be the value of a 0-d float64 tensor."""
        if val.node.expr.is_Symbol:
            self.floats[val.node.expr] = tensor

    def locate(self, view: torch.fx.Node, argument: Callable[[Any], Any]) -> None:
        """Learn where a slice lies that starts at a number out of a tensor.

        `argument` gives the value of an operand.
        """
        val = view.meta.get("val")
        if view.target not in _FIRST or not isinstance(val, torch.Tensor):
            return
        offset: Any = val.storage_offset()
        if self.known(offset) or not offset.node.expr.is_Symbol:
            return
        base, dim, start = [*view.args, 0, None][:3]
        whole = base.meta["val"]  # type: ignore[union-attr]
        first = _FIRST[view.target](argument(start), self.symbols.size(whole.shape[dim]))
        steps = first * self.symbols.size(whole.stride(dim))
        self.symbols.vars[offset.node.expr] = self.symbols.size(whole.storage_offset()) + steps

    def item(self, val: Any, tensor: Any, name: str) -> Any:
        """`Tensor.item`: a number out of a tensor of one element."""
        flat = op.reshape(tensor, shape_expr([]))
        if isinstance(val, torch.SymFloat):
            number = self.builder.emit(cast(self.builder.normalize(flat), "float64"), name)
            self.bind_float(val, number)
            return number
        whole = op.astype(op.reshape(tensor, shape_expr([1])), "int64")
        truth = isinstance(val, torch.SymBool)
        (symbol,) = val.node.expr.free_symbols  # a boolean is ``Eq(symbol, 1)``
        given = self.symbols.size(symbol)
        if not symbol.is_nonnegative and not truth:
            # TVM takes every variable of a shape for a size, which is never negative.
            given = tirx.Var(f"{symbol}_raised", "int64")
            self.symbols.vars[symbol] = given - tirx.const(_RAISE, "int64")
            whole = op.add(self.builder.emit(whole), scalar(_RAISE, "int64"))
        shape = self.builder.emit(op.tensor_to_shape(self.builder.emit(whole)), name)
        self.builder.match_cast(shape, ShapeType([given]), name)
        return self.value(val)

    def _float(self, expr: Any) -> Any:
        if expr in self.floats:
            return self.floats[expr]
        if expr.is_number:
            return scalar(float(expr), "float64")
        if expr.is_integer:
            return size_tensor(self.symbols.size(expr), "float64")
        if isinstance(expr, symfn.ToFloat):
            return self._float(expr.args[0])
        for kinds, arity in ((_BINARY, 2), (_FOLDS, 0)):
            if type(expr) in kinds:
                operands = [self._float(a) for a in expr.args]
                result = operands[0]
                for operand in operands[1:] if not arity else operands[1:2]:
                    result = self.builder.normalize(kinds[type(expr)](result, operand))
                return result
        name = type(expr).__name__.removeprefix("OpaqueUnaryFn_")
        if name in _UNARY:
            return _UNARY[name](self._float(expr.args[0]))
        raise Unsupported(f"the number {expr}")


def as_operand(bound: Any) -> Any:
    """A TIR expression as an operand of a packed function: a shape of one int64."""
    if str(bound.ty.dtype) == "bool":
        bound = tirx.Select(bound, tirx.const(1, "int64"), tirx.const(0, "int64"))
    return relax.ShapeExpr([bound])
