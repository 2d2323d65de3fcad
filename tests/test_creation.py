"""Tensors from sizes and numbers: constants, ranges, triangles, against eager."""

import pytest
import torch
from special_values import INF, NAN, seeded

from fx2relax.testing import assert_matches_eager

KINDS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8]

CASES = {
    "constants": lambda x: (
        [torch.zeros(2, 3), torch.ones(4, dtype=torch.int32), torch.full((2,), 7)],
        [torch.full((2, 2), 0.5), torch.full((3,), True), torch.full((2,), 3, dtype=torch.half)],
        [torch.full((2,), NAN), torch.full((2,), -INF), torch.tensor(2.5), torch.tensor([1, 2])],
    ),
    "like": lambda x: (
        [torch.zeros_like(x), torch.ones_like(x, dtype=torch.int64), torch.full_like(x, 1.5)],
        [torch.full_like(x, NAN), x.new_zeros(3), x.new_ones(2, 2), x.new_full((2,), 4)],
        [x.new_tensor([1.0, 2.0]), torch.zeros_like(x, memory_format=torch.contiguous_format)],
    ),
    "filled": lambda x: (
        [x.clone().fill_(3), x.clone().zero_(), torch.fill(x, 2), x.clone().fill_diagonal_(9)],
        [x.masked_fill(x > 0, -1), x.clone().masked_fill_(x < 0, NAN)],
    ),
    "uninitialised": lambda x: (
        [torch.empty(2, 3).zero_() + 1, torch.empty_like(x).fill_(2), x.new_empty(4).fill_(1)],
        [
            torch.empty_strided((2, 3), (1, 2)).fill_(5),
            x.new_empty_strided((2, 3), (3, 1)).fill_(1),
        ],
    ),
    "whole ranges": lambda x: (
        [torch.arange(5), torch.arange(2, 9), torch.arange(9, 2, -3), torch.arange(1, 8, 2)],
        [torch.arange(5, dtype=torch.float16), torch.arange(0), torch.arange(3, dtype=torch.uint8)],
    ),
    "ranges of fractions": lambda x: (
        [torch.arange(2.5), torch.arange(0.5, 3, 0.25), torch.arange(1, 0, -0.3)],
        [torch.arange(0, 1, 0.1, dtype=torch.float64), torch.arange(0.0, 5, 2, dtype=torch.int64)],
    ),
    "even spacing": lambda x: (
        [torch.linspace(0, 1, 7), torch.linspace(-2, 5, 1), torch.linspace(3, -3, 8)],
        [torch.linspace(0, 9, 4, dtype=torch.int64), torch.linspace(0, 1, 5, dtype=torch.float64)],
        [torch.logspace(0, 2, 5), torch.logspace(-1, 1, 4, base=2)],
    ),
    "matrices": lambda x: (
        [torch.eye(3), torch.eye(2, 4), torch.eye(3, dtype=torch.bool), torch.vander(x[0])],
        [x.tril(), x.triu(1), x.tril(-1), x.triu(-2), (x > 0).tril(), x.repeat(2, 1, 1).triu()],
        [torch.tril_indices(3, 4, 1), torch.triu_indices(4, 3), torch.diag_embed(x)],
    ),
    "windows": lambda x: (
        [torch.hann_window(9), torch.hamming_window(8), torch.blackman_window(7)],
        [torch.bartlett_window(6), torch.kaiser_window(8), torch.signal.windows.cosine(5)],
    ),
    "grids": lambda x: (
        torch.meshgrid(x[0], x[1], indexing="ij"),
        torch.cartesian_prod(x[0], x[1]),
        torch.nn.functional.one_hot(torch.arange(4) % 3, 3),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values(name):
    assert_matches_eager(lambda x: (CASES[name](x), x + 1), seeded(4, 4))


@pytest.mark.parametrize("dtype", KINDS)
def test_dtypes(dtype):
    def fn(x):
        return (
            [torch.zeros(2, dtype=dtype), torch.ones_like(x), torch.full_like(x, 3)],
            [torch.arange(4, dtype=dtype), x.new_full((2,), 1), torch.eye(3, dtype=dtype)],
            [
                torch.scalar_tensor(3, dtype=dtype),
                x.triu(),
                x.tril(1),
                torch.tensor(2, dtype=dtype),
            ],
        )

    assert_matches_eager(fn, seeded(3, 4, dtype=dtype))


def test_strides():
    x = seeded(2, 3, 4, 5)

    def fn(x):
        return torch.zeros_like(x), torch.ones_like(x[:, ::2]), x.new_zeros(x.shape), x.clone()

    assert_matches_eager(fn, x.to(memory_format=torch.channels_last))
    assert_matches_eager(fn, x.transpose(0, 2))


def test_without_inputs():
    assert_matches_eager(lambda: (torch.zeros(2), torch.arange(3.0).sin(), torch.hann_window(5)))


def test_sizes_change():
    def fn(x):
        n = x.shape[0]
        return (
            [torch.arange(n), torch.zeros(n, 2), torch.eye(n), torch.arange(n - 1, -1, -1)],
            [x.triu(), torch.full((n,), n), torch.arange(0, 2 * n, 2), torch.arange(n) / n],
        )

    compiled = torch.compile(fn, backend="relax", dynamic=True)
    for rows in (4, 6, 3):
        x = seeded(rows, 4)
        torch.testing.assert_close(compiled(x), fn(x))


def test_gradients_go_through_triangles():
    def fn(x):
        return x.tril(-1), x.triu(1), x.masked_fill(x > 0.5, 0.0), x * torch.ones_like(x), x.sgn()

    assert_matches_eager(fn, seeded(4, 5), grad=True)
