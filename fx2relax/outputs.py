"""How a graph's flat outputs are made from what its Relax function returns."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from fx2relax.casting import last
from fx2relax.compat import BlockBuilder, Expr, Var, is_prim_expr, op, shape_expr, tirx, topi
from fx2relax.complexes import Complex, is_complex
from fx2relax.eager_strides import eager_strides
from fx2relax.layouts import (
    concrete,
    dense_permutation,
    dense_strides,
    is_compact,
    is_dense,
    overlaps,
    storage_of,
)
from fx2relax.routes import is_held
from fx2relax.view_replay import Replay, find


@dataclass(frozen=True)
class OutputSpec:
    """One flat output of the graph.

    Attributes:
        kind: ``"result"`` (what the Relax function returns at `index`), ``"size"`` (the same, as
            an int), ``"truth"`` (as a bool), ``"view"`` (a view of the result at `index`),
            ``"input"`` (the caller's own argument at `index`), ``"input_view"`` (a view of it) or
            ``"value"`` (`value`).
        permutation: the axes in memory order; the result is the compact view of the output.
        expanded: where the sizes of an output stand among the results, if some of its axes have
            stride 0; the result has size 1 there.
        strides: where the strides of an output that is not dense stand among the results.
        exact: the strides of an output that lies in memory as its permutation says, but for the
            strides of axes of size 1 or of a tensor of no elements; or where they stand.
        view: where the sizes, strides and offset of a view stand among the results.
        dtype: what a view takes the bits for.
        pairs: whether the result is the tensor of pairs of a complex output.
        conjugate, negated: whether eager gives the bits, and says of them that they are to be taken
            for their conjugates, or with the other sign.
        replay: makes the view of an input of which elements share memory.
        numbers: where the sizes that the replay takes stand among the results.
    """

    kind: str
    index: int = 0
    value: Any = None
    permutation: tuple[int, ...] | None = None
    expanded: int | None = None
    strides: int | None = None
    exact: tuple[int, ...] | int | None = None
    view: tuple[int, int, int] | None = None
    dtype: torch.dtype | None = None
    replay: Replay | None = None
    numbers: int | None = None
    pairs: bool = False
    conjugate: bool = False
    negated: bool = False


def arrange(
    importer: Any, output: torch.fx.Node, variables: dict[int, Any]
) -> tuple[list[Any], list[OutputSpec]]:
    """Emit what the Relax function returns, and say how the outputs are made from it."""
    return _Arranger(importer, output, variables).arrange()


class _Arranger:
    """Decides for each output whether it is a result, an input, or a view of one of them."""

    def __init__(self, importer: Any, output: torch.fx.Node, variables: dict[int, Any]) -> None:
        self.importer = importer
        returned: Any = output.args[0]
        self.items = list(returned) if isinstance(returned, (tuple, list)) else [returned]
        self.results: list[Any] = []
        nodes = list(output.graph.nodes)
        placeholders = [n for n in nodes if n.op == "placeholder"]
        self.positions = {
            node: spec.position for node, spec in zip(placeholders, importer.inputs, strict=False)
        }
        self.inputs = {id(v) for v in variables.values()}
        self.creators: dict[int, torch.fx.Node] = {}
        for node in nodes:
            storage = _storage(node)
            if storage is not None and node in importer.env:
                self.creators.setdefault(storage, node)
        self.shared = Counter(
            storage
            for item in dict.fromkeys(self.items)
            if isinstance(item, torch.fx.Node) and (storage := _storage(item)) is not None
        )
        self.roots: dict[torch.fx.Node, OutputSpec] = {}

    def arrange(self) -> tuple[list[Any], list[OutputSpec]]:
        """The results and one spec per output."""
        known: dict[torch.fx.Node, OutputSpec] = {}  # a tensor that is returned twice is one tensor
        specs = []
        for item in self.items:
            spec = known.get(item) if isinstance(item, torch.fx.Node) else None
            specs.append(self._spec(item) if spec is None else spec)
            # Whoever calls the Relax function alone sees every output.
            if isinstance(item, torch.fx.Node) and self.importer.output_strides:
                known[item] = specs[-1]
        effects = self.importer.calls.effects()
        if self.importer.output_strides or not self.results:
            self.results.extend(effects)
        elif effects:  # the caller sees every result: let the last one need them
            self.results[-1] = self.importer.builder.emit(last(self.results[-1], effects))
        return self.results, specs

    def _spec(self, item: Any) -> OutputSpec:
        if not isinstance(item, torch.fx.Node):
            return OutputSpec("value", value=item)
        if item in self.positions and self.importer.output_strides:
            return OutputSpec("input", self.positions[item])
        storage = _storage(item) if self.importer.output_strides else None
        root = self.creators.get(storage) if storage is not None else None
        if root is not None and root in self.positions:
            found = find(item, root) if overlaps(root.meta["val"]) else None
            if found is not None:
                replay, numbers = found
                given = self._given(numbers) if numbers else None
                index = self.positions[root]
                return OutputSpec("input_view", index, replay=replay, numbers=given)
            return self._view("input_view", self.positions[root], item, root)
        shared = storage is not None and self.shared[storage] > 1
        if root is not None and shared and _fills_storage(root):
            # Outputs that are views of one another in eager are so here.
            if root not in self.roots:
                self.roots[root] = self._result(root)
            if item is root:
                return self.roots[root]
            return self._view("view", self.roots[root].index, item, root)
        return self._result(item)

    def _view(self, kind: str, index: int, item: torch.fx.Node, root: torch.fx.Node) -> OutputSpec:
        val, base = item.meta["val"], root.meta["val"]
        before = base.storage_offset() * base.element_size() // val.element_size()
        sizes, strides = self._given(val.shape), self._given(val.stride())
        view = sizes, strides, self._given([val.storage_offset() - before])
        conjugate = val.is_conj() != (base.is_conj() and base.dtype == val.dtype)
        return OutputSpec(
            kind, index, view=view, dtype=val.dtype, conjugate=conjugate, negated=val.is_neg()
        )

    def _given(self, values: Any) -> int:
        """Let the Relax function return sizes; where they stand among the results."""
        sizes = self.importer.symbols.shape(values)
        self.results.append(self.importer.builder.emit(shape_expr(sizes)))
        return len(self.results) - 1

    def _result(self, node: torch.fx.Node) -> OutputSpec:
        bound = self.importer.env[node]
        index = len(self.results)
        if isinstance(bound, Complex):
            return self._complex(bound, node)
        if not isinstance(bound, Expr):
            return OutputSpec("value", value=bound)
        if is_prim_expr(bound):
            truth = str(bound.ty.dtype) == "bool"
            size = tirx.Cast("int64", bound) if truth else bound
            self.results.append(self.importer.builder.emit(shape_expr([size])))
            return OutputSpec("truth" if truth else "size", index)
        if id(bound) in self.inputs and self.importer.output_strides:
            bound = _copy(bound)
        return self._tensor(bound, node)

    def _complex(self, bound: Complex, node: torch.fx.Node) -> OutputSpec:
        conjugate = node.meta["val"].is_conj() and self.importer.output_strides
        pairs = (bound.conjugate() if conjugate else bound).pairs
        if id(pairs) in self.inputs and self.importer.output_strides:
            pairs = _copy(pairs)
        spec = self._tensor(pairs, node)
        return replace(spec, pairs=True, conjugate=conjugate)

    def _tensor(self, bound: Any, node: torch.fx.Node) -> OutputSpec:
        index, val = len(self.results), node.meta.get("val")
        self.results.append(bound)
        spec = OutputSpec("result", index)
        if self.importer.output_strides and isinstance(val, torch.Tensor) and is_held(val):
            spec = self._physical(bound, node)
        if not isinstance(self.results[index], Var):
            self.results[index] = self.importer.builder.emit(self.results[index])
        return spec

    def _physical(self, bound: Any, node: torch.fx.Node) -> OutputSpec:
        """Lay an output out as eager would: expanded axes once, permuted axes in memory order."""
        index, val = len(self.results) - 1, node.meta["val"]
        shape, strides = concrete(val.shape), concrete(_strides(node))
        if any(size == 0 for size in shape):
            return OutputSpec("result", index, exact=self._exact(node, None))
        zero = [a for a in range(len(shape)) if strides[a] == 0 and shape[a] > 1]
        if zero:
            ones = [1] * len(zero)
            bound = self.importer.builder.emit(op.strided_slice(bound, zero, [0] * len(zero), ones))
            shape = [1 if a in zero else s for a, s in enumerate(shape)]
        expanded = self._given(val.shape) if zero else None
        permutation = dense_permutation(shape, strides)
        if permutation is None:
            self.results[index] = bound
        else:
            pairs = [len(shape)] if is_complex(val) else []
            self.results[index] = op.permute_dims(bound, [*permutation, *pairs])
        if permutation is not None or is_dense(shape, strides):
            exact = None if zero else self._exact(node, permutation)
            return OutputSpec(
                "result", index, permutation=permutation, expanded=expanded, exact=exact
            )
        given = self._given(_strides(node))
        return OutputSpec("result", index, expanded=expanded, strides=given)

    def _exact(
        self, node: torch.fx.Node, permutation: tuple[int, ...] | None
    ) -> tuple[int, ...] | int | None:
        """The strides of an output, unless a compact one in that order has them all."""
        strides = _strides(node)
        if tuple(concrete(strides)) == dense_strides(concrete(node.meta["val"].shape), permutation):
            return None
        static = all(isinstance(stride, int) for stride in strides)
        return strides if static else self._given(strides)


def _strides(node: torch.fx.Node) -> tuple[Any, ...]:
    """An output's strides: of `logical_or` and a few more, fake tensors have those of a guess."""
    eager = eager_strides(node)
    return tuple(node.meta["val"].stride()) if eager is None else eager


def _storage(node: torch.fx.Node) -> int | None:
    """What identifies the memory that a node's value would have in eager."""
    return storage_of(node.meta.get("val"))


def _fills_storage(node: torch.fx.Node) -> bool:
    """Whether a node's value is its whole memory, so that every view of it can be had again.

    The first node in that memory may be a part of it: what it is a view of was made twice, and
    PyTorch has kept the other one.
    """
    val = node.meta["val"]
    held = concrete([val.untyped_storage().nbytes()])[0]
    filled = held == math.prod(concrete(val.shape)) * val.itemsize
    return filled and concrete([val.storage_offset()]) == [0] and is_compact(val)


def _copy(var: Any) -> Any:
    """A fresh tensor: a Relax function that returns its parameter would alias the argument."""
    return BlockBuilder.current().emit_te(topi.identity, var)
