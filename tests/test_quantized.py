"""Operators on quantised tensors: every dtype, axis and form, ties and values out of range."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fx2relax.quantized import operators as q
from fx2relax.testing import assert_matches_eager

INF, NAN = float("inf"), float("nan")
EXACT = {"tol": (0.0, 0.0)}
INTEGERS = [torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32]


def bounds(dtype: torch.dtype) -> tuple[int, int]:
    limits = torch.iinfo(dtype)
    return limits.min, limits.max


def floats(*sizes: int) -> Tensor:
    """Numbers about 0, ties of a scale of 0.5 and what no integer holds."""
    x = torch.randn(*sizes, generator=torch.Generator().manual_seed(0)) * 40
    edges = [NAN, INF, -INF, 0.25, 0.75, -0.25, -0.75, 1.25, 3e9, -3e9, 3e38, -0.0, 63.75]
    x.flatten()[: len(edges)] = torch.tensor(edges)
    return x


def integers(dtype: torch.dtype, *sizes: int) -> Tensor:
    low, high = bounds(dtype)
    made = torch.randint(low, high, sizes, generator=torch.Generator().manual_seed(0))
    made.flatten()[:2] = torch.tensor([low, high])
    return made.to(dtype)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_quantize_per_tensor(dtype, kind):
    low, high = bounds(dtype)

    def forms(x: Tensor, scale: Tensor, point: Tensor, low_: Tensor, high_: Tensor):
        return [
            q.quantize_per_tensor.default(x, 0.5, 3, low, high, dtype),
            q.quantize_per_tensor.default(x, 0.1, 0, max(low, -5), 6, dtype),
            q.quantize_per_tensor.tensor(x, scale, point, low, high, dtype),
            q.quantize_per_tensor.tensor2(x, scale, point, low_, high_, dtype),
        ]

    x = floats(9, 11).to(kind)
    limits = torch.tensor(low), torch.tensor(high)
    for scale, point in itertools.product(
        [torch.tensor(0.3), torch.tensor([0.7], dtype=torch.float64)],
        [torch.tensor(7), torch.tensor([1], dtype=torch.int32)],
    ):
        assert_matches_eager(forms, x, scale, point, *limits, **EXACT)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("out", [None, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dequantize_per_tensor(dtype, out):
    low, high = bounds(dtype)

    def forms(x: Tensor, scale: Tensor, point: Tensor):
        limits = torch.tensor(low), torch.tensor(high)
        return [
            q.dequantize_per_tensor.default(x, 0.013, 3, low, high, dtype, out_dtype=out),
            q.dequantize_per_tensor.tensor(x, scale, point, low, high, dtype, out_dtype=out),
            q.dequantize_per_tensor.tensor2(x, scale, point, *limits, dtype, out_dtype=out),
        ]

    for point in (torch.tensor(100), torch.tensor([-3], dtype=torch.int32), torch.tensor(2.5)):
        scale = torch.tensor([0.017], dtype=torch.float64)
        assert_matches_eager(forms, integers(dtype, 7, 5), scale, point, **EXACT)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_per_channel(dtype, axis):
    low, high = bounds(dtype)
    count = (3, 5, 7)[axis]
    scales = torch.rand(count, generator=torch.Generator().manual_seed(1)) + 0.1

    def quantized(x: Tensor, scales: Tensor, points: Tensor):
        return q.quantize_per_channel.default(x, scales, points, axis, low, high, dtype)

    def dequantized(x: Tensor, scales: Tensor, points: Tensor):
        return [
            q.dequantize_per_channel.default(x, scales, points, axis, low, high, dtype),
            q.dequantize_per_channel.default(x, scales, None, axis, low, high, dtype),
            q.dequantize_per_channel.default(
                x, scales, points, axis, low, high, dtype, out_dtype=torch.float16
            ),
        ]

    for kind, point in itertools.product(
        (torch.float32, torch.float64), (torch.int64, torch.int32, torch.int8, torch.float32)
    ):
        points = torch.arange(count).to(point) * 20 - 30
        assert_matches_eager(quantized, floats(3, 5, 7), scales.to(kind), points, **EXACT)
        if dtype is not torch.uint16:  # which PyTorch does not promote
            x = integers(dtype, 3, 5, 7)
            assert_matches_eager(dequantized, x, scales.to(kind), points, **EXACT)
