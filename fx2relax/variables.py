"""The Relax variables of a graph's inputs, and the inputs that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fx2relax.compat import AnyType, BlockBuilder, ShapeType, TensorType, Var, op
from fx2relax.complexes import Complex, held_type, is_complex
from fx2relax.layouts import inverse
from fx2relax.params import InputSpec
from fx2relax.routes import is_held
from fx2relax.shapes import SymbolTable
from fx2relax.storages import logical


def variable(spec: InputSpec, symbols: SymbolTable) -> Var:
    """A variable for an input, of its ``relax_name``: a tensor as it lies in memory."""
    name = spec.relax_name
    if isinstance(spec.val, torch.SymInt):
        return Var(name, ShapeType([symbols.size(spec.val)]))
    if isinstance(spec.val, torch.SymFloat):
        return Var(name, TensorType([], "float64"))
    if not isinstance(spec.val, torch.Tensor) or not is_held(spec.val):
        return Var(name, AnyType())
    shape = symbols.shape(spec.val.shape)
    if spec.permutation is not None:
        shape = [shape[axis] for axis in spec.permutation]
    if spec.storage is not None:
        shape = [spec.storage]
    return Var(name, held_type(spec.val, shape))


def as_captured(spec: InputSpec, var: Any, symbols: SymbolTable, builder: BlockBuilder) -> Any:
    """The value of an input as the graph was captured with it, of the variable that it lies in."""
    if isinstance(spec.val, torch.SymInt):
        return symbols.size(spec.val)
    if spec.storage is not None:
        return builder.emit(logical(spec, var), spec.relax_name)
    pairs = is_complex(spec.val)
    if spec.permutation is not None:
        order = [*inverse(spec.permutation), *([len(spec.permutation)] if pairs else [])]
        var = builder.emit(op.permute_dims(var, order), spec.relax_name)
    return Complex(pairs=var) if pairs else var


def unbound_symbols(params: Sequence[InputSpec]) -> list[Any]:
    """Symbols that appear in a size, and nowhere as a size of their own."""
    seen: dict[Any, None] = {}
    bare: set[Any] = set()
    for spec in params:
        sizes = spec.val.shape if isinstance(spec.val, torch.Tensor) else [spec.val]
        for size in sizes:
            if isinstance(size, torch.SymInt):
                expr = size.node.expr
                seen.update(dict.fromkeys(sorted(expr.free_symbols, key=str)))
                if expr.is_Symbol:
                    bare.add(expr)
    return [symbol for symbol in seen if symbol not in bare]
