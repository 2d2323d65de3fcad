"""Inputs on which operators go wrong: NaN, infinities, signed zeros, extremes of integers."""

from __future__ import annotations

import math

import torch

NAN, INF = math.nan, math.inf
VALUES = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.25, 7.0, -7.0, 1e-4, 100.0, NAN, INF, -INF]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.uint8]


def odd(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Special values of a dtype as a vector."""
    if dtype.is_floating_point:
        return torch.tensor(VALUES, dtype=dtype)
    if dtype == torch.bool:
        return torch.tensor([True, False, True])
    info = torch.iinfo(dtype)
    return torch.tensor([0, 1, 2, 3, 7, 100, info.max, info.min, info.max - 1], dtype=dtype)


def pairs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Every special value against every other: a column and a row."""
    values = odd(dtype)
    return values[:, None], values


def seeded(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random numbers of a dtype, the same at every call; integers from -9 to 9, or 0 to 9."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    low = 0 if dtype in (torch.uint8, torch.bool) else -9
    return torch.randint(low, 10, shape, generator=generator).to(dtype)
