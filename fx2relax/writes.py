"""Inputs that a graph writes to: by its caller, once the graph has run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fx2relax.params import InputSpec
from fx2relax.partial_writes import at_indices

aten = torch.ops.aten
Node = torch.fx.Node


def copy_kept(forward: torch.fx.GraphModule, metadata: Any) -> None:
    """Keep copies of written inputs for the backward pass, which needs what they held before.

    Args:
        forward: its outputs are the results, then what is kept.
        metadata: AOTAutograd's, of the graph's inputs and results.
    """
    placeholders = [n for n in forward.graph.nodes if n.op == "placeholder"]
    infos = zip(placeholders, metadata.input_info, strict=False)
    written = {node for node, info in infos if info.mutates_data}
    output = forward.graph.output_node()
    values = list(output.args[0])  # type: ignore[arg-type]
    first = metadata.num_forward
    values[first:] = [_copied(output, value, written) for value in values[first:]]
    output.args = (tuple(values),)


def take_writes(graph: torch.fx.GraphModule, specs: Sequence[InputSpec]) -> list[int]:
    """Take the writes to inputs out of a graph, which returns what is written behind the rest.

    Args:
        graph: it is changed.
        specs: its inputs, which are told which output is written to them.

    Returns:
        the positions of the inputs that are written to.
    """
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    output = graph.graph.output_node()
    found = [
        n
        for n in graph.graph.nodes
        if n.target is aten.copy_.default and n.args[0] in placeholders and {*n.users} <= {output}
    ]
    if not found:
        return []
    for node in found:
        at_indices(graph, node)
    for node in found:  # a graph that returns the write returns the input
        node.replace_all_uses_with(node.args[0])
    written = {n.args[0] for n in found}
    values = [_copied(output, n.args[1], written) for n in found]
    before = len(output.args[0])  # type: ignore[arg-type]
    output.args = ((*output.args[0], *values),)  # type: ignore[misc]
    positions = [placeholders.index(n.args[0]) for n in found]
    for place, position in enumerate(positions, before):
        specs[position].written = place if positions.count(position) == 1 else None
    for node in found:
        graph.graph.erase_node(node)
    graph.recompile()
    return positions


def writing(
    function: Callable[[tuple[Any, ...]], Any], positions: list[int]
) -> Callable[[tuple[Any, ...]], Any]:
    """A graph's function, of a tuple, that does the writes that `take_writes` took out."""
    if not positions:
        return function

    def call(arguments: tuple[Any, ...]) -> list[Any]:
        results = list(function(arguments))
        values = results[len(results) - len(positions) :]
        with torch.no_grad():
            for position, value in zip(positions, values, strict=True):
                arguments[position].copy_(value)
        return results[: len(results) - len(positions)]

    return call


def _copied(output: Node, value: Any, written: set[Node]) -> Any:
    """A value of the graph's output, or a copy where it is one of these inputs or a view of it."""
    if not isinstance(value, Node) or _base(value) not in written:
        return value
    with output.graph.inserting_before(output):
        copy = output.graph.call_function(aten.clone.default, (value,))
    copy.meta = {**value.meta, "val": value.meta["val"].clone()}
    return copy


def _base(node: Node) -> Node:
    """What a chain of views is a view of."""
    while isinstance(node.target, torch._ops.OpOverload) and node.target.is_view:
        node = node.args[0]  # type: ignore[assignment]
    return node
