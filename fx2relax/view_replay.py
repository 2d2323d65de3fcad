"""An output that is a view of an input, made by the graph's own view operators.

`as_strided` gives the same memory, but where elements of the input share a place its derivative is
that of the memory: a gradient is summed over them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Number:
    """One of the sizes that a replay is given."""

    index: int


@dataclass(frozen=True)
class Replay:
    """View operators, the one on the input first, and what they take besides their tensor."""

    steps: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...]

    def __call__(self, base: torch.Tensor, numbers: Any) -> torch.Tensor:
        """The view of `base`; `numbers` are the sizes that `find` named."""

        def known(value: Any) -> Any:
            return int(numbers[value.index]) if isinstance(value, Number) else value

        for target, args, kwargs in self.steps:
            args, kwargs = pytree.tree_map(known, (args, kwargs))
            base = target(base, *args, **kwargs)
        return base


def find(item: torch.fx.Node, root: torch.fx.Node) -> tuple[Replay, list[Any]] | None:
    """How a node is made from `root`, and the symbolic sizes that it takes; None if unclear."""
    numbers: list[Any] = []

    def number(value: Any) -> Any:
        if not isinstance(value, torch.fx.Node):
            return value
        size = value.meta["val"]
        if isinstance(size, torch.SymInt):
            numbers.append(size)
            return Number(len(numbers) - 1)
        return size

    steps = []
    while item is not root:
        target = item.target
        if not isinstance(target, torch._ops.OpOverload) or not target.is_view:
            return None
        source, *others = item.args
        if not isinstance(source, torch.fx.Node) or any(
            isinstance(n.meta.get("val"), torch.Tensor) for n in item.all_input_nodes[1:]
        ):
            return None
        args, kwargs = torch.fx.map_arg((tuple(others), dict(item.kwargs)), number)
        steps.append((target, args, kwargs))
        item = source
    return Replay(tuple(reversed(steps))), numbers
