"""Calls that several processes make together, and what follows from them for a graph.

Each process has to make the same calls in the same order: a graph that holds one is never run
twice in the place of once. Nor is a graph whose results the others have too run in one of several
ways that each process chooses by its own clock: they differ in the last digits, and what is meant
to be equal everywhere would drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from fx2relax.errors import BuildFailure, source_line

Node = torch.fx.Node

# Of operators that talk to other processes.
_SPACES = frozenset(
    {"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor"}
)
# Of operators that do not. A user's own operator may.
_ALONE = frozenset({"aten", "prims", "prim", "fx2relax", "_quantized", "quantized_decomposed"})
_WAIT = "_c10d_functional::wait_tensor"
# They write to their operands, which no schema says; and to wait for a send at once may be to wait
# for ever, where the other side sends first too.
_ONE_SIDED = frozenset(f"_c10d_functional::{name}" for name in ("isend", "irecv", "batch_p2p_ops"))


def is_collective(target: Any) -> bool:
    """Whether an operator talks to other processes; to wait for one is none of them."""
    return _space(target) in _SPACES and _name(target) != _WAIT


def waited(result: Any) -> Any:
    """What a collective returned, once it is there; the tensors among it are waited for."""
    wait = torch.ops._c10d_functional.wait_tensor.default
    return pytree.tree_map_only(torch.Tensor, wait, result)


def processes() -> int:
    """How many processes work together, this one among them."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size()


def is_shared(graph_module: torch.fx.GraphModule) -> bool:
    """Whether other processes run a Dynamo graph together with this one.

    It makes collectives, or computes with tensors of `torch.distributed`, which each process holds
    a part of or all of; a user's own operator may do so unseen.
    """
    several = processes() > 1
    for node in _nodes(graph_module):
        if _in_distributed(type(node.meta.get("example_value"))):
            return True
        if node.op != "call_function":
            continue
        space = _space(node.target)
        if space in _SPACES or _in_distributed(node.target):
            return True
        if several and space and space not in _ALONE:
            return True
    return False


def _nodes(graph_module: torch.fx.GraphModule) -> Iterator[Node]:
    """The nodes of a graph and of the graphs within it."""
    for module in graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from module.graph.nodes


def _in_distributed(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).startswith("torch.distributed.")


def holds_collectives(graph_module: torch.fx.GraphModule) -> bool:
    """Whether a graph, or a graph within it, makes collectives or waits for one."""
    return any(_space(n.target) in _SPACES for n in _nodes(graph_module) if n.op == "call_function")


def refuse_one_sided(graph: torch.fx.GraphModule) -> None:
    """Leave graphs that send to one process, or receive from one, to PyTorch.

    Raises:
        BuildFailure: this is one.
    """
    for node in graph.graph.nodes:
        if node.op == "call_function" and _name(node.target) in _ONE_SIDED:
            where = source_line(node) or node.format_node()
            raise BuildFailure(f"it sends to one process, or receives from one, at {where}")


def waited_inputs(graph: torch.fx.GraphModule) -> list[int]:
    """The positions of an ATen graph's inputs that it waits for.

    A collective of another graph, or one that was made in eager, may still be writing to them.
    """
    places = {
        node: place
        for place, node in enumerate(n for n in graph.graph.nodes if n.op == "placeholder")
    }
    found = {
        places[source]
        for node in graph.graph.nodes
        if node.op == "call_function" and _name(node.target) == _WAIT
        for source in _sources(node)
    }
    return sorted(found)


def _sources(node: Node) -> Iterator[Node]:
    """The inputs that a value is made of, but for what collectives have made of them."""
    left, seen = list(node.all_input_nodes), set()
    while left:
        value = left.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.op == "placeholder":
            yield value
        elif not is_collective(value.target):
            left.extend(value.all_input_nodes)


def waiting(
    function: Callable[[tuple[Any, ...]], Any], positions: list[int]
) -> Callable[[tuple[Any, ...]], Any]:
    """A graph's function, of a tuple, that waits for inputs at these positions first.

    What is waited for is known by the tensor's memory, and a program is given another view of it.
    """
    if not positions:
        return function

    def call(arguments: tuple[Any, ...]) -> Any:
        with torch.no_grad():
            waited([arguments[position] for position in positions])
        return function(arguments)

    return call


def _space(target: Any) -> str:
    return _name(target).split("::")[0]


def _name(target: Any) -> str:
    """``namespace::operator``; empty for what is no operator."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    return ""
