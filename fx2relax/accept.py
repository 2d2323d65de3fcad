"""What a converter returned, emitted and held against PyTorch's fake value."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from fx2relax.casting import Statistic, cast, resized
from fx2relax.compat import (
    Expr,
    TensorType,
    Var,
    dtype_of,
    is_prim_expr,
    is_tensor,
    is_tuple,
    relax,
    shape_values,
)
from fx2relax.complexes import Complex, held_dtype, is_complex
from fx2relax.errors import ImportFailure, source_line, target_name
from fx2relax.shapes import SymbolTable

Node = torch.fx.Node


def accept(importer: Any, node: Node, result: Any) -> Any:
    """Emit the results of a node's converter.

    Raises ImportFailure where one has another dtype or shape than PyTorch gives it; sizes that
    cannot be compared now are compared when the program runs. Of several tensors those that no
    node takes are left out: what eager keeps for a gradient has other sizes on a GPU.
    """
    val = node.meta.get("val")
    if not isinstance(val, (tuple, list)):
        return _accept_one(importer, node, result, val, node.name)
    if isinstance(result, Expr) and is_tuple(importer.builder.normalize(result)):
        whole = importer.builder.emit(result, node.name)
        result = [relax.TupleGetItem(whole, i) for i in range(len(val))]
    if len(result) < len(val):
        raise ImportFailure(
            f"the converter of {target_name(node.target)} returned {len(result)} "
            f"values, PyTorch returns {len(val)}, at {source_line(node)}"
        )
    items = [user.target is operator.getitem for user in node.users]
    taken: Any = range(len(val))
    if items and all(items):
        taken = {item.args[1] for item in node.users if item.users}
    return tuple(
        _accept_one(importer, node, r, v, f"{node.name}_{i}")
        if i in taken or not isinstance(v, torch.Tensor)
        else None
        for i, (r, v) in enumerate(zip(result, val, strict=False))
    )


def _accept_one(importer: Any, node: Node, result: Any, val: Any, name: str) -> Any:
    builder, symbols = importer.builder, importer.symbols
    if val is None and isinstance(result, Expr):  # an assertion
        importer.calls.held.append(builder.emit(result, name))
        return None
    if not isinstance(val, torch.Tensor) or result is None:
        return result
    expected = symbols.shape(val.shape)
    dtype = held_dtype(val.dtype)
    if isinstance(result, Statistic):
        result = cast(result.value, dtype)
    if is_complex(val):
        if not isinstance(result, Complex):
            raise _no_tensor(node, result, "complex")
        if result.has_parts:
            return result.map(lambda part: _accept_tensor(importer, node, part, expected, dtype))
        pairs = _accept_tensor(importer, node, result.pairs, [*expected, 2], dtype, name)
        return Complex(pairs=pairs)
    if not isinstance(result, Expr) or is_prim_expr(result):
        raise _no_tensor(node, result, "Relax")
    return _accept_tensor(importer, node, result, expected, dtype, name)


def _accept_tensor(
    importer: Any, node: Node, result: Any, expected: list[Any], dtype: str, name: str = ""
) -> Any:
    builder, symbols = importer.builder, importer.symbols
    var = result if isinstance(result, Var) else builder.emit(result, name)
    if not is_tensor(var) or dtype_of(var) != dtype:
        raise _disagrees(node, var, expected, dtype)
    actual = shape_values(var.ty)
    if actual is not None and symbols.same_shape(actual, expected):
        # Relax knows nothing of the sizes' ranges, and has to see as well that they are equal.
        static = all(isinstance(size, int) for size in actual)
        evident = static or SymbolTable().same_shape(actual, expected)
        return var if evident else resized(var, expected, name)
    if actual is not None and (
        len(actual) != len(expected)
        or any(
            isinstance(a, int) and isinstance(e, int) and a != e
            for a, e in zip(actual, expected, strict=True)
        )
    ):
        raise _disagrees(node, var, expected, dtype)
    # A size that depends on data, or one that TVM cannot prove: checked at run time.
    if actual is not None:
        return resized(var, expected, name)
    return builder.match_cast(var, TensorType(expected, dtype), name)


def _no_tensor(node: Node, result: Any, kind: str) -> ImportFailure:
    return ImportFailure(
        f"the converter of {target_name(node.target)} returned "
        f"{type(result).__name__}, not a {kind} tensor, at {source_line(node)}"
    )


def _disagrees(node: Node, var: Any, shape: list[Any], dtype: str) -> ImportFailure:
    return ImportFailure(
        f"the converter of {target_name(node.target)} gives {var.ty}, PyTorch gives shape "
        f"{tuple(shape)} of {dtype}, at {source_line(node) or node.format_node()}"
    )
