"""Whether two traced graphs compute the same values, by numbering what they compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

_MAX_CONSTANT = 4096


def trace(function: Callable[..., Any], fakes: Sequence[Any]) -> fx.GraphModule:
    """A function's ATen graph over fake tensors; literal tensors in it stay attributes."""
    gm: fx.GraphModule = make_fx(function, _allow_non_fake_inputs=True)(*fakes)
    return gm


class Values:
    """Numbers for values: equal numbers are provably equal values of the same inputs."""

    def __init__(self, inputs: int) -> None:
        self.inputs = inputs
        self._numbers: dict[Any, int] = {}

    def number(self, gm: fx.GraphModule) -> list[Any] | None:
        """The numbers of a graph's outputs; None if the graph writes in place.

        Constants among the outputs, which have no number, stand as themselves.
        """
        env: dict[fx.Node, int] = {}
        draws = 0
        placeholders = 0
        outputs: list[Any] = []
        for node in gm.graph.nodes:
            if node.op == "output":
                outputs = list(_key(node.args[0], env)[1:])
                continue
            value = node.meta.get("val")
            if node.op == "placeholder":
                key: Any = ("input", placeholders)
                placeholders += 1
            elif node.op == "get_attr":
                key = _constant(getattr(gm, str(node.target)))
            elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                # One symbolic expression is one value, however the graph came by it.
                key = ("size", str(value.node.expr))
            else:
                key = (node.target, _key(node.args, env), _key(node.kwargs, env))
                if isinstance(node.target, torch._ops.OpOverload):
                    if node.target._schema.is_mutable:
                        return None
                    if torch.Tag.nondeterministic_seeded in node.target.tags:
                        key, draws = (*key, draws), draws + 1
            env[node] = self._numbers.setdefault(key, len(self._numbers))
        return outputs


def _constant(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() <= _MAX_CONSTANT and not value.is_meta:
        return ("constant", value.dtype, tuple(value.shape), str(value.tolist()))
    return ("object", id(value))


def _key(value: Any, env: dict[fx.Node, int]) -> Any:
    """A node's arguments as something hashable, with numbers in place of nodes."""
    if isinstance(value, fx.Node):
        return ("value", env[value])
    if isinstance(value, (list, tuple)):
        return ("sequence", *(_key(v, env) for v in value))
    if isinstance(value, dict):
        return ("dict", *((k, _key(value[k], env)) for k in sorted(value)))
    return (type(value), repr(value))
