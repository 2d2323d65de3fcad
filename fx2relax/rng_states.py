"""What the draws of recomputed layers return.

For a draw inside of a checkpointed layer AOTAutograd puts in a pair of operators,
one that saves the generator's state and one that draws from it again, without their fake values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch._guards import detect_fake_mode
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state


def fill_in(graph: torch.fx.GraphModule) -> None:
    """Give each such node of an ATen graph the fake value that it lacks."""
    for node in graph.graph.nodes:
        if node.op != "call_function" or "val" in node.meta:
            continue
        if node.target is run_and_save_rng_state:
            operator, *args = node.args
            size = torch.get_rng_state().numel()
            with _mode(args):
                state = torch.empty(size, dtype=torch.uint8)
            node.meta["val"] = state, _value(operator, args, node.kwargs)
        elif node.target is run_with_rng_state:
            _, operator, *args = node.args
            node.meta["val"] = _value(operator, args, node.kwargs)


def _known(arguments: Any) -> Any:
    return torch.fx.map_arg(arguments, lambda node: node.meta["val"])


def _mode(arguments: Any) -> Any:
    return detect_fake_mode(_known(arguments)) or torch._subclasses.FakeTensorMode()


def _value(operator: Any, args: Any, kwargs: Any) -> Any:
    with _mode(args):
        return operator(*_known(tuple(args)), **_known(kwargs))
