"""Weights as a direction and a length, as speech networks have them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from fx2relax.testing import assert_matches_eager


@pytest.mark.parametrize("dim", [0, 2])
def test_convolutions(dim):
    torch.manual_seed(0)
    module = weight_norm(nn.Conv1d(4, 6, 3), dim=dim)
    assert_matches_eager(module, torch.randn(2, 4, 9), grad=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(dtype):
    torch.manual_seed(0)
    module = weight_norm(nn.Linear(4, 6)).to(dtype)
    assert_matches_eager(module, torch.randn(2, 4, dtype=dtype), grad=True)


def test_the_length_of_the_whole():
    torch.manual_seed(0)
    module = weight_norm(nn.Linear(4, 6), dim=None)
    assert_matches_eager(module, torch.randn(2, 4), grad=True)
