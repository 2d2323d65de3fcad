"""Softmax and its logarithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .common import cast, converts, dtype, ndim, normalize_axis, op, reshape, shape
from .reductions import wide

aten = torch.ops.aten


def _over_axis(function: Callable[..., Any], x: Any, dim: int, half_to_float: bool) -> Any:
    """Half precision is computed in float32 and rounded once."""
    kind = "float32" if half_to_float else dtype(x)
    if any(s == 0 for s in shape(x)):
        return cast(x, kind)
    rank = ndim(x)
    source = wide(x) if rank else reshape(wide(x), [1])
    result = function(source, axis=normalize_axis(dim, rank))
    return cast(result if rank else reshape(result, []), kind)


@converts(aten._softmax.default)
def softmax(self: Any, dim: int, half_to_float: bool) -> Any:
    """A row that holds NaN or infinity, or nothing but -infinity, gives NaN."""
    return _over_axis(op.nn.softmax, self, dim, half_to_float)


@converts(aten._log_softmax.default)
def log_softmax(self: Any, dim: int, half_to_float: bool) -> Any:
    """Logarithm of `softmax`, without leaving the logarithms."""
    return _over_axis(op.nn.log_softmax, self, dim, half_to_float)
