"""What a traced graph needs before it is read: no dead nodes, no unused weights, good names."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fx2relax.collectives import is_collective

_aten = torch.ops.aten
# In a functional graph these are their argument.
_IDENTITIES = (
    _aten.lift_fresh_copy.default,
    _aten.lift_fresh.default,
    _aten.lift.default,
    _aten.detach.default,
    _aten.alias.default,
)


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph, with what Dynamo and `torch.export` have noted on it.

    `copy.deepcopy` would copy the input and output structures of an exported graph too, which
    warns, and would drop the notes that AOTAutograd reads from Dynamo's placeholders.
    """
    made = fx.Graph(graph.owning_module, graph._tracer_cls)
    made._codegen = graph._codegen
    nodes: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        new = nodes[node] = made.node_copy(node, nodes.__getitem__)
        for name, value in vars(node).items():
            if name.startswith("_dynamo"):
                setattr(new, name, value)
    return made


class Described(Protocol):
    """What is known of a placeholder."""

    name: str
    kind: str
    mutated: bool


def tidy(
    gm: fx.GraphModule, inputs: Sequence[Described], mutations: int
) -> tuple[list[int], list[tuple[Any, torch.Tensor]]]:
    """Clean up a traced graph in place.

    Args:
        gm: the graph, with one placeholder for each of `inputs`.
        inputs: their descriptions.
        mutations: how many of the last outputs are inputs' new values.

    Returns:
        The positions of the inputs that are left (weights that nothing uses are dropped), and
        the ``(fake, real)`` constant tensors that have become placeholders after them.
    """
    graph = gm.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _IDENTITIES:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif _settled(node):
            graph.erase_node(node)
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    output.args = (tuple(output.args[0]),)
    graph.eliminate_dead_code(lambda node: not _removable(node))
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    kept = []
    for position, (node, described) in enumerate(zip(placeholders, inputs, strict=True)):
        if node.users or described.kind == "user" or described.mutated:
            kept.append(position)
            _name(node, described.name)
        else:
            graph.erase_node(node)
    constants = _lift_constants(gm)
    graph.lint()
    gm.recompile()
    return kept, constants


def _settled(node: fx.Node) -> bool:
    """Whether this is an assertion that tracing has checked, or that the guards repeat."""
    if node.target is _aten._assert_tensor_metadata.default:
        return True
    if node.target is not _aten._assert_scalar.default:
        return False
    condition = node.args[0]
    value = condition.meta.get("val") if isinstance(condition, fx.Node) else condition
    return not free_unbacked_symbols(value)


def _removable(node: fx.Node) -> bool:
    """Whether a node may go when nothing uses it.

    Random draws may not, for the sequence, nor what other processes make too.
    """
    if node.op in ("placeholder", "output"):
        return False
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        tags = target.tags
        needed = torch.Tag.nondeterministic_seeded in tags or is_collective(target)
        return not (needed or target._schema.is_mutable or node.is_impure())
    return target is operator.getitem or not node.is_impure()


def _name(node: fx.Node, name: str) -> None:
    """Give a placeholder the nearest valid name to the one that the user knows."""
    valid = re.sub(r"\W", "_", name)
    node._rename(f"_{valid}" if valid[:1].isdigit() else valid)
    node.target = node.name


def _lift_constants(gm: fx.GraphModule) -> list[tuple[Any, torch.Tensor]]:
    """Turn tensors that the graph holds as attributes into placeholders; one per tensor."""
    graph = gm.graph
    made: dict[int, fx.Node] = {}
    values: list[tuple[Any, torch.Tensor]] = []
    anchor = next(n for n in graph.nodes if n.op != "placeholder")
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        value = getattr(gm, str(node.target), None)
        if not isinstance(value, torch.Tensor):
            continue
        if id(value) not in made:
            with graph.inserting_before(anchor):
                new = graph.placeholder(f"constant_{len(values)}")
            new.meta = dict(node.meta)
            made[id(value)] = new
            values.append((node.meta.get("val"), value))
        node.replace_all_uses_with(made[id(value)])
        if anchor is node:
            anchor = node.next
        graph.erase_node(node)
    return values


def number_constants(gm: fx.GraphModule, inputs: Sequence[Described]) -> None:
    """Name the constants among a graph's placeholders ``constant_0``, ``constant_1`` ..."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    found = [(n, d) for n, d in zip(placeholders, inputs, strict=True) if d.kind == "constant"]
    for number, (node, described) in enumerate(found):
        described.name = f"constant_{number}"
        _name(node, described.name)
    gm.recompile()
