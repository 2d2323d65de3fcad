"""A module with other weights than its own: to call, or for its converter to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def functional_call(
    module: torch.nn.Module,
    weights: Mapping[str, torch.Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """`torch.func.functional_call`, which leaves recurrent modules as they were.

    They keep a second list of their weights, and Dynamo guards on what is in it.
    """
    lists = ("_flat_weights", "_flat_weight_refs")
    saved = [
        (m, name, m.__dict__[name])
        for m in module.modules()
        if isinstance(m, torch.nn.RNNBase)
        for name in lists
        if name in m.__dict__
    ]
    try:
        return torch.func.functional_call(module, dict(weights), tuple(args), dict(kwargs))
    finally:
        for owner, name, value in saved:
            owner.__dict__[name] = value


class ModuleView:
    """A module as its converter sees it.

    Parameters and buffers, nested ones (``m.conv.weight``) included, are Relax values; every
    other attribute is the module's own. ``isinstance`` sees the module's class.
    """

    def __init__(
        self, module: torch.nn.Module, values: Mapping[str, Any], prefix: str = ""
    ) -> None:
        self._view = (module, values, prefix)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._view[0])

    def __getattr__(self, name: str) -> Any:
        module, values, prefix = self.__dict__["_view"]
        if prefix + name in values:
            return values[prefix + name]
        return self._wrap(name, getattr(module, name))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int):
            key = key % len(self)
        return getattr(self, str(key))

    def __len__(self) -> int:
        return len(self._view[0])  # type: ignore[arg-type]

    def __iter__(self) -> Any:
        return iter([child for _, child in self.named_children()])

    def __repr__(self) -> str:
        return f"view of {self._view[0]!r}"

    def named_children(self) -> list[tuple[str, Any]]:
        """The child modules, as views."""
        return [(n, self._wrap(n, c)) for n, c in self._view[0].named_children()]

    def children(self) -> list[Any]:
        """The child modules, as views."""
        return [child for _, child in self.named_children()]

    def named_parameters(self) -> list[tuple[str, Any]]:
        """The parameters' Relax values under their names, nested ones included."""
        module, values, prefix = self._view
        return [
            (n, values[prefix + n]) for n, _ in module.named_parameters() if prefix + n in values
        ]

    def parameters(self) -> list[Any]:
        """The parameters' Relax values."""
        return [value for _, value in self.named_parameters()]

    def _wrap(self, name: str, value: Any) -> Any:
        _, values, prefix = self._view
        if isinstance(value, torch.nn.Module):
            return ModuleView(value, values, f"{prefix}{name}.")
        return value
