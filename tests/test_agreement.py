"""Sizes that PyTorch's guards make equal, and TVM cannot prove so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fx2relax.testing import assert_matches_eager

HALVE = nn.Conv2d(3, 3, 3, 2, 1).requires_grad_(False)
DOUBLE = nn.ConvTranspose2d(3, 3, 2, 2).requires_grad_(False)


def test_a_skip_connection():
    def skip(x):
        deep = DOUBLE(HALVE(x))
        return torch.cat([deep, x], 1), deep + x, torch.where(x > 0, deep, x)

    assert_matches_eager(skip, torch.randn(2, 3, 16, 20), dynamic=True, grad=True)


def test_an_upsampled_skip_connection():
    def skip(x):
        deep = nn.functional.interpolate(HALVE(x), scale_factor=2, mode="nearest")
        return torch.cat([x, deep[:, :, : x.shape[2], : x.shape[3]]], 1)

    assert_matches_eager(skip, torch.randn(2, 3, 16, 20), dynamic=True, grad=True)


def test_a_size_that_is_left_over():
    def heads(x, y):
        x = torch.cat([x, y], 1)
        return x.view(x.shape[0], x.shape[1], -1, 48).transpose(1, 2) * 2

    assert_matches_eager(heads, torch.randn(2, 3, 192), torch.randn(2, 4, 192), dynamic=True)


def _scanned(a, b):
    """Every ``h[i] = a[i] * h[i - 1] + b[i]``, by halves: (n, ...)."""
    size = a.shape[0]
    if size < 2:
        return b
    odd = _scanned(a[:-1:2] * a[1::2], a[1::2] * b[:-1:2] + b[1::2])
    even = a[2::2] * (odd if size % 2 else odd[:-1]) + b[2::2]
    even = torch.cat([b[:1], even])
    if even.shape[0] > odd.shape[0]:
        odd = nn.functional.pad(odd, (0, 0, 0, 1))
    return torch.stack([even, odd], 1).flatten(0, 1)[:size]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("size", [9, 14])
def test_a_scan_by_halves(size):
    """Of sizes as ``s // 8``, which are 1 where PyTorch's guards hold."""

    def scan(a, b, out):
        return torch.matmul(_scanned(a, b) + b, out).sin()

    given = torch.rand(size, 6), torch.randn(size, 6), torch.randn(6, 4)
    assert_matches_eager(scan, *given, dynamic=True, grad=True)
    assert_matches_eager(scan, *given, dynamic=True, options={"library": "none"})


def test_factors_whose_sizes_agree_by_a_guard():
    def product(x, y):
        half = x[:, : x.shape[1] // 2]
        if half.shape[1] != y.shape[0]:
            return half
        return half @ y, half @ y[:, 0], torch.einsum("ij,jk->ik", half, y)

    assert_matches_eager(product, torch.randn(3, 10), torch.randn(5, 4), dynamic=True, grad=True)
