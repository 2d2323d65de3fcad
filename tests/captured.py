"""Run a captured graph in eager."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from fx2relax.capture import Captured


def run(captured: Captured, *inputs: Any) -> tuple[Any, dict[str, Any]]:
    """Run a captured graph in eager: what the user's graph returns, and new values by name."""
    for node in captured.graph.nodes:
        assert node.op in ("placeholder", "call_function", "output")
        assert node.op == "output" or "val" in node.meta, node
        if isinstance(node.target, torch._ops.OpOverload):
            assert not node.target._schema.is_mutable, node
    given = iter(v for v in pytree.tree_leaves(inputs) if isinstance(v, torch.Tensor))
    sizes = iter(v for v in pytree.tree_leaves(inputs) if isinstance(v, int))
    arguments = []
    for described in captured.inputs:
        if described.kind != "user":
            arguments.append(described.value)
        else:
            arguments.append(next(given if isinstance(described.val, torch.Tensor) else sizes))
    with torch.no_grad():
        flat = fx.Interpreter(captured.gm).run(*arguments)
    users = captured.num_outputs
    new = [captured.inputs[i].name for i in captured.mutations]
    return captured.unflatten(flat[:users]), dict(zip(new, flat[users:], strict=True))


def targets(captured: Captured) -> list[Any]:
    return [n.target for n in captured.graph.nodes if n.op == "call_function"]
