"""Operators that make one tensor out of numbers alone are evaluated when the graph is imported."""

from __future__ import annotations

import torch
from torch import nn

import fx2relax
from fx2relax.testing import assert_matches_eager


def test_windows():
    assert_matches_eager(
        lambda x: (
            x * torch.hamming_window(20, True)
            + torch.kaiser_window(20, False, beta=3.0)
            + torch.blackman_window(20)
        ),
        torch.randn(20),
    )


def test_dtypes():
    assert_matches_eager(
        lambda x, y: (
            x * torch.bartlett_window(20, dtype=torch.float64),
            y * torch.hamming_window(20, dtype=torch.bfloat16),
        ),
        torch.randn(20),
        torch.randn(20).bfloat16(),
    )


def test_import():
    class Windowed(nn.Module):
        def forward(self, x):
            return x * torch.hamming_window(20)

    text = str(fx2relax.from_fx(torch.export.export(Windowed(), (torch.randn(20),))))
    assert "call_pure_packed" not in text
    assert text.count("R.multiply") == 1
