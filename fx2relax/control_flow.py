"""`torch.cond` as a Relax `If`: each branch is a function of its own, and so is the choice.

Relax has no control flow inside of a dataflow block, where everything else of a graph is: the
choice is a function that the block calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from fx2relax.casting import cast
from fx2relax.collectives import holds_collectives
from fx2relax.compat import ShapeType, TensorType, Var, is_prim_expr, op, relax, shape_expr
from fx2relax.complexes import Complex
from fx2relax.imported import Imported
from fx2relax.outputs import OutputSpec
from fx2relax.params import InputSpec

Node = torch.fx.Node


def is_choice(node: Node) -> bool:
    """Whether a node is a `torch.cond`."""
    return node.op == "call_function" and node.target is torch.ops.higher_order.cond


@dataclass
class _Choice:
    """A function ``(predicate, *operands, *sizes)``; `branch` tells what it returns."""

    function: Any
    specs: list[InputSpec]
    branch: Imported


class Choices:
    """The functions of one graph's `torch.cond` nodes.

    Args:
        importer: imports the graph; its module gets the functions.
        nested: makes an importer of a branch from its graph, its inputs and its name.
    """

    def __init__(self, importer: Any, nested: Callable[..., Any]) -> None:
        self.importer, self.nested = importer, nested
        self.made: dict[Node, _Choice] = {}

    def prepare(self, nodes: Sequence[Node]) -> None:
        """Import the branches, before the graph's own function is begun."""
        for node in nodes:
            if is_choice(node) and not self._talks(node):
                self.made[node] = self._make(node)

    def _talks(self, node: Node) -> bool:
        """Whether a branch makes collectives: it runs in PyTorch, in order with the others."""
        branches = [self._graph(n) for n in node.args[1:3]]
        return any(holds_collectives(branch) for branch in branches)

    def _graph(self, node: Any) -> Any:
        return getattr(self.importer.graph_module, str(node.target))

    def emit(self, node: Node) -> tuple[Any, ...]:
        """Call a node's function; a value for each result of the node."""
        choice, builder = self.made[node], self.importer.builder
        env = self.importer.env
        predicate = op.reshape(cast(env[node.args[0]], "bool"), ())
        operands = [
            _passed(env[n])
            for n, spec in zip(_operands(node), choice.specs, strict=True)
            if spec.passed
        ]
        if choice.branch.solved:
            sizes = [self.importer.symbols.var(s) for s in choice.branch.solved]
            operands.append(shape_expr(sizes))
        whole = builder.emit(choice.function(predicate, *operands), node.name)
        return tuple(
            spec.value if spec.kind == "value" else _returned(whole, spec)
            for spec in choice.branch.outputs
        )

    def _make(self, node: Node) -> _Choice:
        builder, specs = self.importer.builder, _specs(node)
        name = f"{self.importer.name}_{node.name}"
        branches = [self._branch(n, specs, f"{name}_{n.name}") for n in node.args[1:3]]  # type: ignore[union-attr]
        yes, no = (builder.get().get_global_var(branch.name) for branch in branches)
        shell = self.nested(self.importer.graph_module, specs, name)
        params = [shell.param(spec) for spec in specs if spec.passed]
        if branches[0].solved:
            sizes = [shell.symbols.var(s) for s in branches[0].solved]
            params.append(Var("sizes", ShapeType(sizes)))
        predicate = Var("predicate", TensorType([], "bool"))
        with builder.function(name, [predicate, *params], private=True):
            chosen = builder.emit(relax.If(predicate, yes(*params), no(*params)))
            builder.emit_func_output(chosen)
        return _Choice(builder.get().get_global_var(name), specs, branches[0])

    def _branch(self, node: Any, specs: list[InputSpec], name: str) -> Imported:
        nested = self.nested(self._graph(node), specs, name)
        with nested.symbols.active():
            imported: Imported = nested.run()
        self.importer.calls.made.update(imported.torch_calls)
        self.importer.declined.extend(nested.declined)
        self.importer.nodes += nested.nodes
        self.importer.converted += nested.converted
        return imported


def _passed(value: Any) -> Any:
    if isinstance(value, Complex):
        return value.pairs
    # A size is a number here where the symbol is known by now.
    whole = isinstance(value, int) and not isinstance(value, bool)
    return shape_expr([value]) if whole or is_prim_expr(value) else value


def _returned(whole: Any, spec: OutputSpec) -> Any:
    value = relax.TupleGetItem(whole, spec.index)
    return Complex(pairs=value) if spec.pairs else value


def _operands(node: Node) -> list[Any]:
    return list(node.args[3])  # type: ignore[arg-type]


def _specs(node: Node) -> list[InputSpec]:
    """What a branch takes; numbers among it are built in."""
    return [
        InputSpec(
            f"operand{i}" if not isinstance(n, Node) else n.name,
            "user",
            n.meta.get("val") if isinstance(n, Node) else n,
            position=i,
        )
        for i, n in enumerate(_operands(node))
    ]
