"""How a graph's flat outputs are made from what its Relax function returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from fx2relax.compat import Expr, Var, is_prim_expr, op, relax, shape_expr
from fx2relax.params import concrete, dense_permutation


@dataclass(frozen=True)
class OutputSpec:
    """One flat output of the graph.

    Attributes:
        kind: ``"result"`` (what the Relax function returns at `index`), ``"size"`` (the same, as
            an int), ``"input"`` (the caller's own argument at `index`) or ``"value"`` (`value`).
        permutation: the axes in memory order; the result is the compact view of the output.
        expanded: where the sizes of an output stand among the results, if some of its axes have
            stride 0; the result has size 1 there.
        strides: where the strides of an output that is not dense stand among the results.
        val: the fake tensor that the graph was captured with.
    """

    kind: str
    index: int = 0
    value: Any = None
    permutation: tuple[int, ...] | None = None
    expanded: int | None = None
    strides: int | None = None


def arrange(
    importer: Any, output: torch.fx.Node, variables: dict[int, Any]
) -> tuple[list[Any], list[OutputSpec]]:
    """Emit what the Relax function returns, and say how the outputs are made from it."""
    inputs = {
        id(var): spec.position
        for spec in importer.inputs
        if (var := variables.get(id(spec))) is not None and spec.position >= 0
    }
    positions = {
        node: spec.position
        for node, spec in zip(
            (n for n in output.graph.nodes if n.op == "placeholder"), importer.inputs, strict=False
        )
    }
    results: list[Any] = []
    specs: list[OutputSpec] = []
    flat: Sequence[Any] = output.args[0] if isinstance(output.args[0], (tuple, list)) else [output.args[0]]
    for item in flat:
        if not isinstance(item, torch.fx.Node):
            specs.append(OutputSpec("value", value=item))
            continue
        if item in positions:
            specs.append(OutputSpec("input", positions[item]))
            continue
        bound = importer.env[item]
        if isinstance(bound, Expr) and id(bound) in inputs:
            bound = _copy(bound)
        specs.append(_result(importer, item, bound, results))
    results.extend(importer.order[-1:])
    return results, specs


def _copy(var: Any) -> Any:
    """A fresh tensor: a Relax function that returns its parameter would alias the argument."""
    return op.reshape(var, op.shape_of(var))


def _result(importer: Any, node: torch.fx.Node, bound: Any, results: list[Any]) -> OutputSpec:
    index = len(results)
    val = node.meta.get("val")
    if not isinstance(bound, Expr):
        return OutputSpec("value", value=bound)
    if is_prim_expr(bound):
        results.append(importer.builder.emit(relax.ShapeExpr([bound])))
        return OutputSpec("size", index)
    results.append(bound)
    spec = OutputSpec("result", index)
    if importer.output_strides and isinstance(val, torch.Tensor) and val.layout is torch.strided:
        spec = _physical(importer, bound, val, results)
    if not isinstance(results[index], Var):
        results[index] = importer.builder.emit(results[index])
    return spec


def _physical(importer: Any, bound: Any, val: torch.Tensor, results: list[Any]) -> OutputSpec:
    """Lay an output out as eager would: expanded axes once, permuted axes in memory order."""
    index = len(results) - 1
    shape, strides = concrete(val.shape), concrete(val.stride())
    if any(size == 0 for size in shape):
        return OutputSpec("result", index)

    def given(values: Any) -> int:
        results.append(importer.builder.emit(shape_expr(importer.symbols.shape(values))))
        return len(results) - 1

    zero = [a for a in range(len(shape)) if strides[a] == 0 and shape[a] > 1]
    if zero:
        ones = [1] * len(zero)
        bound = importer.builder.emit(op.strided_slice(bound, zero, [0] * len(zero), ones))
        shape = [1 if a in zero else s for a, s in enumerate(shape)]
    expanded = given(val.shape) if zero else None
    permutation = dense_permutation(shape, strides)
    if permutation is not None:
        results[index] = op.permute_dims(bound, permutation)
        return OutputSpec("result", index, permutation=permutation, expanded=expanded)
    results[index] = bound
    step = 1
    dense = True
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        dense = dense and (size == 1 or stride == step)
        step *= size
    if dense:
        return OutputSpec("result", index, expanded=expanded)
    return OutputSpec("result", index, expanded=expanded, strides=given(val.stride()))
