"""Operators on quantised tensors: every dtype, axis and form, ties and values out of range."""

from __future__ import annotations

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


@pytest.mark.sweep
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
    for scale, point in (
        (torch.tensor(0.3), torch.tensor([1], dtype=torch.int32)),
        (torch.tensor([0.7], dtype=torch.float64), torch.tensor(7)),
    ):
        assert_matches_eager(forms, x, scale, point, *limits, **EXACT)


@pytest.mark.sweep
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


@pytest.mark.sweep
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

    for kind, point in (
        (torch.float32, torch.int64),
        (torch.float64, torch.int32),
        (torch.float32, torch.int8),
        (torch.float32, torch.float32),
    ):
        points = torch.arange(count).to(point) * 20 - 30
        assert_matches_eager(quantized, floats(3, 5, 7), scales.to(kind), points, **EXACT)
        if dtype is not torch.uint16:  # which PyTorch does not promote
            x = integers(dtype, 3, 5, 7)
            assert_matches_eager(dequantized, x, scales.to(kind), points, **EXACT)


def test_shapes():
    """No axis, no element, elements that lie apart, and sizes that are not known."""

    def both(x: Tensor) -> list[Tensor]:
        made = q.quantize_per_tensor.default(x, 0.5, 3, -128, 127, torch.int8)
        return [made, q.dequantize_per_tensor.default(made, 0.5, 3, -128, 127, torch.int8)]

    for x in (torch.tensor(1.3), torch.zeros(0, 3), floats(6, 8)[:, ::2], floats(4, 9).t()):
        assert_matches_eager(both, x, **EXACT)
    torch._dynamo.reset()
    compiled = torch.compile(both, backend="relax", dynamic=True, fullgraph=True)
    for sizes in ((5, 7), (16, 3), (2, 9)):
        assert all(map(torch.equal, compiled(floats(*sizes)), both(floats(*sizes))))


def test_symbolic_channels():
    def both(x: Tensor, scales: Tensor, points: Tensor) -> list[Tensor]:
        made = q.quantize_per_channel.default(x, scales, points, 1, -128, 127, torch.int8)
        back = q.dequantize_per_channel.default(made, scales, points, 1, -128, 127, torch.int8)
        return [made, back]

    compiled = torch.compile(both, backend="relax", dynamic=True, fullgraph=True)
    for rows, count in ((5, 7), (16, 3), (2, 9)):
        inputs = floats(rows, count), torch.rand(count) + 0.1, torch.arange(count)
        assert all(map(torch.equal, compiled(*inputs), both(*inputs)))


def test_wrong_bounds_and_scales_are_errors():
    def quantized(scale: float, high: int):
        def run(x: Tensor) -> Tensor:
            return q.quantize_per_tensor.default(x, scale, 0, 0, high, torch.uint8)

        return run

    for run in (quantized(0.0, 255), quantized(0.5, 256)):
        with pytest.raises((ZeroDivisionError, AssertionError)):
            run(torch.ones(3))
        with pytest.raises((ZeroDivisionError, AssertionError)):
            torch.compile(run, backend="relax")(torch.ones(3))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_choose_qparams(kind):
    def chosen(x: Tensor):
        return [
            q.choose_qparams.tensor(x, 0, 255, 1e-4, torch.uint8),
            q.choose_qparams.tensor(x, -128, 127, 1e-4, torch.int8),
            q.choose_qparams_symmetric.tensor(x, -127, 127, 1e-4, torch.int8),
            q.choose_qparams_symmetric.tensor(x, 0, 255, 1e-4, torch.uint8),
        ]

    x = torch.randn(5, 17, generator=torch.Generator().manual_seed(0)).to(kind)
    edges = [torch.tensor(e, dtype=kind) for e in ([0.0, 0.0], [NAN, 1.0], [INF, 1.0], [-INF, 2.0])]
    for inputs in (x, x * 1e-6, x.abs(), -x.abs(), *edges):
        assert_matches_eager(chosen, inputs, **EXACT)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16], ids=str)
def test_per_token(kind):
    def run(x: Tensor):
        scales, points = q.choose_qparams_per_token_asymmetric(x, torch.int8)
        made = q.quantize_per_token(x, scales, points, -128, 127, torch.int8)
        args = scales, points, -128, 127, torch.int8, torch.float32
        return made, scales, points, q.dequantize_per_token(made, *args)

    def by_floats(x: Tensor):
        scales = x.abs().amax(-1, keepdim=True) / 127
        points = torch.full_like(scales, 2.5)
        return q.quantize_per_token(x, scales, points, -128, 127, torch.int8)

    x = torch.randn(3, 20, 100, generator=torch.Generator().manual_seed(0)).to(kind)
    assert_matches_eager(run, x, **EXACT)
    assert_matches_eager(by_floats, x, **EXACT)


def test_per_channel_group():
    def run(w: Tensor, scales: Tensor, points: Tensor):
        made = q.quantize_per_channel_group(w, scales, points, -8, 7, torch.int8, 32)
        args = scales, points, -8, 7, torch.int8, 32, torch.float32
        return made, q.dequantize_per_channel_group(made, *args)

    make = torch.Generator().manual_seed(0)
    w, scales = torch.randn(20, 160, generator=make), torch.rand(20, 5, generator=make) / 4 + 0.01
    assert_matches_eager(run, w, scales, torch.randint(-3, 3, (20, 5), generator=make), **EXACT)
    assert_matches_eager(run, w, scales, torch.randn(20, 5, generator=make), **EXACT)
    w[3, 4] = NAN
    with pytest.raises(RuntimeError, match="must not contain NaNs"):
        torch.compile(run, backend="relax")(w, scales, torch.zeros(20, 5))
