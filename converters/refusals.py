"""Calls that PyTorch refuses while they run, which fake tensors let through.

The predicates are the `refuses` of converters: the dtype of the result and the operands before
their promotion, fake tensors and numbers, give the reason or None.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from fx2relax import dtypes

from .common import Refused


@functools.cache
def _fits(value: float, dtype: torch.dtype) -> bool:
    try:
        torch.full((2,), value, dtype=dtype)  # a single element is not checked
    except RuntimeError:
        return False
    return True


def fitting(value: Any, dtype: str) -> Any:
    """A number, or whatever else it is, that PyTorch takes for an element of this dtype."""
    if isinstance(value, (int, float)) and not _fits(value, dtypes.to_torch(dtype)):
        raise Refused(f"{value}, which {dtype} does not hold")
    return value


def numbers_overflow(result: torch.dtype, *operands: Any) -> str | None:
    """Numbers that the result's dtype does not hold."""
    numbers = [v for v in operands if isinstance(v, (int, float))]
    return next(
        (f"{v}, which {result} does not hold" for v in numbers if not _fits(v, result)), None
    )


def booleans(result: torch.dtype, *operands: Any) -> str | None:
    """A boolean among the operands."""
    kinds = {v.dtype if isinstance(v, torch.Tensor) else type(v) for v in operands}
    return "a boolean" if kinds & {torch.bool, bool} else None


def boolean_result(result: torch.dtype, *operands: Any) -> str | None:
    """Booleans alone."""
    return "booleans" if result is torch.bool else None


def negative_power(result: torch.dtype, base: Any, exponent: Any) -> str | None:
    """An integer to a negative number; to a negative tensor it is 0 but for 1 and -1."""
    negative = isinstance(exponent, (int, float)) and exponent < 0
    return f"{result} to a negative power" if negative and not result.is_floating_point else None


def fractions(result: torch.dtype, *operands: Any) -> str | None:
    """Floats among the operands."""
    return f"{result}" if result.is_floating_point else None
