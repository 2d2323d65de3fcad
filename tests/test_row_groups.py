"""Kernels that run by the same rows are one, and give what they gave apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fx2relax
from fx2relax.testing import assert_matches_eager

W = torch.linspace(0.5, 1.5, 768)


class Model(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def kernels(function: Callable[..., Any], *args: Tensor) -> list[str]:
    with torch.no_grad():
        report = fx2relax.explain(Model(function), *args)
    return [kernel.name for kernel in report.data.kernels]


JOINED: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "softmax of scores and a mask": (
        lambda x, y: F.softmax(x * 0.125 + y, -1),
        [(6, 77, 77), (77, 77)],
    ),
    "softmax across rows": (lambda x: F.softmax(x * 2, 1), [(2, 9, 70)]),
    "log softmax": (lambda x: F.log_softmax(x * 0.5, -1), [(8, 1001)]),
    "layer norm of a sum": (
        lambda x, y: F.layer_norm(x + y, (768,), W, W) * 2,
        [(33, 768), (33, 768)],
    ),
    "RMS norm": (lambda x: F.rms_norm(x, (768,), W, 1e-6), [(33, 768)]),
    "RMS norm of a sum": (lambda x, y: F.rms_norm(x + y, (768,), W), [(33, 768), (33, 768)]),
    "Llama's": (
        lambda x: W * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
        [(2, 17, 768)],
    ),
    "mean": (lambda x, y: (x * y).mean(-1), [(40, 1003), (40, 1003)]),
    "mean of columns": (lambda x, y: (x * y).mean(0), [(40, 203), (40, 203)]),
    "mean of all": (lambda x, y: ((x - y) ** 2).mean(), [(40, 203), (40, 203)]),
    "unit rows": (lambda x: F.normalize(x, dim=-1), [(50, 99)]),
    "log of sums": (lambda x, y: (x * y).logsumexp(-1), [(50, 99), (50, 99)]),
    "standardised": (
        lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5),
        [(50, 199)],
    ),
    "largest of": (lambda x, y: (x * y).argmax(-1), [(50, 99), (50, 99)]),
    "cosine": (F.cosine_similarity, [(50, 99), (50, 99)]),
    "one row": (lambda x: F.softmax(x * 2, -1), [(1, 500)]),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", JOINED)
def test_kernels_of_the_same_rows_are_one(name: str) -> None:
    function, shapes = JOINED[name]
    torch.manual_seed(1)
    inputs = [torch.randn(shape) for shape in shapes]
    assert len(kernels(function, *inputs)) == 1
    assert_matches_eager(function, *inputs)


APART: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], int]] = {
    "read twice": (lambda x, y: (F.softmax(x + y, -1), x + y), [(9, 50), (9, 50)], 2),
    "across memory": (lambda x: F.softmax(x.mT * 2, -1), [(60, 70)], 2),
    "sums of columns, then all of it": (lambda x: F.normalize(x, dim=0), [(600, 700)], 2),
    "rows beyond the cache": (lambda x: F.normalize(x, dim=1), [(8, 64, 56, 56)], 2),
    "costly work on short rows": (lambda x: F.softmax(torch.tanh(x), -1), [(500, 9)], 2),
    "costly work on shorter rows": (lambda x: F.softmax(torch.tanh(x), -1), [(500, 5)], 2),
    "of all, then its root": (lambda x, y: ((x - y) ** 2).sum().sqrt(), [(40, 203), (40, 203)], 2),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", APART)
def test_others_stay_apart(name: str) -> None:
    function, shapes, count = APART[name]
    torch.manual_seed(1)
    inputs = [torch.randn(shape) for shape in shapes]
    assert len(kernels(function, *inputs)) == count
    assert_matches_eager(function, *inputs)


def test_a_kernel_stays_before_a_write_to_what_it_reads() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        scaled = x * y
        x.add_(1)
        y.mul_(x)
        return F.softmax(scaled, -1) + x.mean(-1, keepdim=True)

    assert_matches_eager(function, torch.randn(20, 50), torch.randn(20, 50))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    for function, shapes in JOINED.values():
        if shapes[0][-1] < 200:
            assert_matches_eager(function, *(torch.randn(s).to(dtype) for s in shapes))


def test_sizes_that_vary() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return F.softmax(x * 0.125 + y, -1) * F.normalize(x, dim=-1)

    for size in (5, 17, 64):
        torch._dynamo.reset()
        assert_matches_eager(
            function, torch.randn(3, size, size), torch.randn(size, size), dynamic=True
        )


def test_gradients_through_them() -> None:
    for name in ("softmax of scores and a mask", "RMS norm", "unit rows", "log of sums"):
        function, shapes = JOINED[name]
        assert_matches_eager(function, *(torch.randn(s) for s in shapes), grad=True)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8])
def test_rows_of_any_length(dtype: torch.dtype) -> None:
    """What a row leaves after its whole vectors runs in shorter ones."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if dtype is torch.int8:
            return x * 3 + y, (x > y).to(torch.int8) + x
        return torch.exp(x) * y + 1, F.softmax(x * 0.5 + y, -1)

    for length in (1, 3, 5, 13, 16, 17, 23, 24, 30, 31, 47, 127):
        torch._dynamo.reset()
        x, y = torch.randn(2, 5, length) * 3
        assert_matches_eager(function, x.to(dtype), y.to(dtype))
