"""Sizes that PyTorch's guards make equal, and TVM cannot prove so."""

from __future__ import annotations

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
