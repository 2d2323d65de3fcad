"""A graph for a GPU with PyTorch's calls joined, before it is imported.

The rewritten graph is one of operators still: PyTorch can run it, on a processor as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx
from torch._guards import detect_fake_mode
from torch.utils import _pytree as pytree

from fx2relax.params import InputSpec

Node = torch.fx.Node


class Rewrite:
    """A copy of a graph that is being rewritten.

    Attributes:
        graph: the copy.
        weights: the nodes that are made of frozen weights alone.
    """

    def __init__(self, module: torch.fx.GraphModule, specs: Sequence[InputSpec]) -> None:
        """Copy a graph.

        Args:
            module: every node carries its fake value in ``meta["val"]``; it is not changed.
            specs: one for each of its placeholders.
        """
        self.graph = torch.fx.Graph(module)
        copied: dict[Node, Node] = {}
        for node in module.graph.nodes:
            copied[node] = self.graph.node_copy(node, copied.__getitem__)
        self.module = torch.fx.GraphModule(module, self.graph)
        values = [n.meta.get("val") for n in self.graph.nodes]
        self._mode = detect_fake_mode(pytree.tree_leaves(values))
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        self.weights = {
            n for n, spec in zip(placeholders, specs, strict=False) if spec.frozen and spec.passed
        }
        for node in self.graph.nodes:
            if node.op == "get_attr":
                self.weights.add(node)
            elif node.op == "call_function":
                self._note(node)

    def _note(self, node: Node) -> None:
        inputs = node.all_input_nodes
        if inputs and all(n in self.weights for n in inputs):
            self.weights.add(node)

    def emit(self, like: Node, target: Any, *args: Any, val: Any = None, **kwargs: Any) -> Node:
        """A new node in the place where nodes are inserted.

        Args:
            like: the node whose work it does, for the user's source line.
            target: an operator.
            args: its arguments.
            val: its fake value, if it is known.
            kwargs: its keyword arguments.
        """
        node = self.graph.call_function(target, args, kwargs)
        node.meta = {k: v for k, v in like.meta.items() if k != "val"}
        if val is None:
            given, named = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
            assert self._mode is not None
            with self._mode, torch.no_grad():
                val = target(*given, **named)
        node.meta["val"] = val
        self._note(node)
        return node

    def like(self, val: torch.Tensor, shape: Sequence[Any], order: Sequence[int]) -> torch.Tensor:
        """A fake tensor of a dtype and device, dense in an order of its axes."""
        assert self._mode is not None
        strides: list[Any] = [1] * len(shape)
        step: Any = 1
        for axis in reversed(order):
            strides[axis] = step
            step = step * shape[axis]
        with self._mode:
            return torch.empty_strided(list(shape), strides, dtype=val.dtype, device=val.device)

    def replace(self, old: Node, new: Node) -> None:
        """Let a new node stand for an old one; what nothing reads then goes."""
        old.replace_all_uses_with(new)
        self.drop(old)

    def drop(self, node: Node) -> None:
        """Take a node away that nothing reads, and what it alone read; effects stay."""
        if node.users or node.op != "call_function" or node.is_impure():
            return
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags:
            return
        inputs = node.all_input_nodes
        self.graph.erase_node(node)
        for other in inputs:
            self.drop(other)

    def nodes(self, *targets: Any) -> Iterator[Node]:
        """The nodes that call one of some operators, but for those that were dropped meanwhile."""
        for node in list(self.graph.nodes):
            if node.op == "call_function" and node.target in targets and not node._erased:
                yield node

    def done(self) -> torch.fx.GraphModule:
        """The graph as a module."""
        self.graph.lint()
        return torch.fx.GraphModule(self.module, self.graph)


def target_of(node: Any) -> Any:
    """What a node calls; None for one that calls nothing."""
    return node.target if isinstance(node, Node) and node.op == "call_function" else None


def val_of(node: Any) -> torch.Tensor | None:
    """The fake tensor of a node that is a tensor."""
    val = node.meta.get("val") if isinstance(node, Node) else None
    return val if isinstance(val, torch.Tensor) else None


def only_user(node: Node) -> Node | None:
    """The one node that reads a node, in one of its arguments; None if there are more."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    leaves = pytree.tree_leaves((list(user.args), dict(user.kwargs)))
    return user if sum(leaf is node for leaf in leaves) == 1 else None
