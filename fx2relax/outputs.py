"""How a graph's flat outputs are made from what its Relax function returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from fx2relax.compat import Expr, Var, is_prim_expr, op, relax
from fx2relax.params import concrete, dense_permutation


@dataclass(frozen=True)
class OutputSpec:
    """One flat output of the graph.

    Attributes:
        kind: ``"result"`` (what the Relax function returns at `index`), ``"size"`` (the same, as
            an int), ``"input"`` (the caller's own argument at `index`) or ``"value"`` (`value`).
        permutation: the axes in memory order; the result is the compact view of the output.
        expanded: the axes with stride 0; the result has size 1 there, and `val` the full size.
        val: the fake tensor that the graph was captured with.
    """

    kind: str
    index: int = 0
    value: Any = None
    permutation: tuple[int, ...] | None = None
    expanded: tuple[int, ...] = ()
    val: Any = None


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
    permutation: tuple[int, ...] | None = None
    expanded: tuple[int, ...] = ()
    if importer.output_strides and isinstance(val, torch.Tensor) and val.layout is torch.strided:
        bound, permutation, expanded = _physical(bound, val)
    if not isinstance(bound, Var):
        bound = importer.builder.emit(bound)
    results.append(bound)
    return OutputSpec("result", index, permutation=permutation, expanded=expanded, val=val)


def _physical(bound: Any, val: torch.Tensor) -> tuple[Any, tuple[int, ...] | None, tuple[int, ...]]:
    """Lay an output out as eager would: expanded axes once, permuted axes in memory order."""
    shape, strides = concrete(val.shape), concrete(val.stride())
    expanded = tuple(a for a in range(len(shape)) if strides[a] == 0 and shape[a] > 1)
    if expanded:
        ones = [1] * len(expanded)
        bound = op.strided_slice(bound, list(expanded), [0] * len(expanded), ones)
        shape = [1 if a in expanded else s for a, s in enumerate(shape)]
        strides = [0 if a in expanded else s for a, s in enumerate(strides)]
    permutation = dense_permutation(shape, strides)
    if permutation is not None:
        bound = op.permute_dims(bound, permutation)
    return bound, permutation, expanded
