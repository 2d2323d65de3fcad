"""Operators whose results depend on strides: brought to a layout for which the rules agree.

A rule stands before the overload's own converter, and declines what that takes as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def _compact_table(target: Any) -> Callable[..., Any]:
    """`embedding_bag`: what is kept for the gradient depends on the table's strides."""

    def rule(weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if weight.stride(1) == 1:
            return NotImplemented
        return target(weight.contiguous(), *args, **kwargs)

    return rule


def _slices(x: torch.Tensor, dim: int, distinct: Callable[[torch.Tensor], Any]) -> Any:
    """Distinct slices along an axis: eager's lie in memory slice by slice, PyTorch's rule forgets.

    Along the first axis both are compact.
    """
    dim = dim % x.dim() if x.dim() else 0
    if dim == 0:
        return NotImplemented
    found, *rest = distinct(x.movedim(dim, 0).contiguous())
    return found.movedim(0, dim), *rest


def _unique_dim(x: torch.Tensor, dim: int, *flags: bool) -> Any:
    return _slices(x, dim, lambda moved: aten.unique_dim(moved, 0, *flags))


def _unique_dim_consecutive(x: torch.Tensor, dim: int, *flags: bool) -> Any:
    return _slices(x, dim, lambda moved: aten.unique_dim_consecutive(moved, 0, *flags))


def _unique_consecutive(
    x: torch.Tensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    if dim is None:
        return NotImplemented
    flags = return_inverse, return_counts
    return _slices(x, dim, lambda moved: aten.unique_consecutive(moved, *flags, 0))


RULES: dict[Any, Callable[..., Any]] = {
    aten._embedding_bag.default: _compact_table(aten._embedding_bag.default),
    aten._embedding_bag_forward_only.default: _compact_table(
        aten._embedding_bag_forward_only.default
    ),
    aten.unique_dim.default: _unique_dim,
    aten.unique_dim_consecutive.default: _unique_dim_consecutive,
    aten.unique_consecutive.default: _unique_consecutive,
}
