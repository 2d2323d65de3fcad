"""The way of a call, end to end, on the smallest graphs."""

import pytest
import torch

from fx2relax.testing import assert_matches_eager


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_elementwise(dynamic):
    assert_matches_eager(lambda x, y: x * 2 + y, torch.randn(4, 5), torch.randn(5), dynamic=dynamic)


def test_permuted_output_has_eager_strides():
    assert_matches_eager(lambda x: (x * 2).t(), torch.randn(4, 5))


def test_linear():
    assert_matches_eager(torch.nn.Linear(5, 3), torch.randn(4, 5))
