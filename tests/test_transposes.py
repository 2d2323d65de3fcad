"""Permuted copies: whole tiles, tiles that overlap, sizes below a tile, and what is fused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fx2relax.testing import assert_matches_eager

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
CASES = [
    ((64, 48), (1, 0)),
    ((33, 17), (1, 0)),
    ((100, 9), (1, 0)),
    ((5, 70), (1, 0)),
    ((2, 19, 15, 17), (0, 2, 3, 1)),
    ((2, 15, 17, 19), (0, 3, 1, 2)),
    ((3, 20, 7, 24), (0, 2, 3, 1)),
    ((4, 3, 21, 8, 18), (0, 3, 1, 4, 2)),
]
FUSED: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, y: x.t() + y,
    lambda x, y: torch.where(y > 0, x.t(), y),
    lambda x, y: torch.nn.functional.gelu(x.t() * 2) * y,
    lambda x, y: torch.cat([x.t(), y]),
    lambda x, y: torch.nn.functional.pad(x.t() + y, (1, 2)),
    lambda x, y: x.t() * x.t().sum(1, keepdim=True) + y[0],
    lambda x, y: (x.t() + y).to(torch.bfloat16),
]


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 50
    if dtype.is_floating_point:
        x.view(-1)[::7] = float("nan")
        x.view(-1)[3::11] = float("-inf")
    return x.to(dtype)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "order"), CASES, ids=str)
def test_permuted(shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype) -> None:
    assert_matches_eager(
        lambda x: x.permute(order).clone(memory_format=torch.contiguous_format),
        numbers(shape, dtype),
        tol=0,
    )


@pytest.mark.parametrize("size", [(40, 33), (7, 50), (3, 3), (16, 16)], ids=str)
def test_sizes_left_open(size: tuple[int, int]) -> None:
    x, y = torch.randn(size), torch.randn(size).t().contiguous()
    assert_matches_eager(lambda x, y: x.t() + y, x, y, dynamic=True)


@pytest.mark.parametrize("fn", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_fused(fn: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(s, generator=generator).to(dtype) for s in ((37, 53), (53, 37)))
    assert_matches_eager(fn, x, y)
