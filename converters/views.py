"""Shapes and views: the same elements in another arrangement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .common import converts, op, product, reshape, shape

aten = torch.ops.aten


@converts(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def view(self: Any, size: Sequence[Any]) -> Any:
    """Another shape for the same elements; one size may be -1."""
    sizes = list(size)
    unknown = [i for i, s in enumerate(sizes) if isinstance(s, int) and s == -1]
    if unknown:
        sizes[unknown[0]] = 1
        sizes[unknown[0]] = product(shape(self)) // product(sizes)
    return reshape(self, sizes)


@converts(aten.permute.default)
def permute(self: Any, dims: Sequence[int]) -> Any:
    """The axes in another order."""
    rank = len(dims)
    return op.permute_dims(self, [d % rank for d in dims]) if rank else self
