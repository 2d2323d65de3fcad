"""The way of a call, end to end, on the smallest graphs."""

import pytest
import torch
import tvm

from fx2relax import report
from fx2relax.testing import assert_matches_eager


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_elementwise(dynamic):
    assert_matches_eager(lambda x, y: x * 2 + y, torch.randn(4, 5), torch.randn(5), dynamic=dynamic)


def test_permuted_output_has_eager_strides():
    assert_matches_eager(lambda x: (x * 2).t(), torch.randn(4, 5))


def test_linear():
    assert_matches_eager(torch.nn.Linear(5, 3), torch.randn(4, 5))


def test_kernels_that_tvm_cannot_fuse_stay_apart(monkeypatch):
    def fails():
        def fuse(mod):
            raise tvm.error.InternalError("two ways to write a size")

        return fuse

    monkeypatch.setattr(tvm.relax.transform, "FuseTIR", fails)
    before = report.counters.tir_kernels
    assert_matches_eager(lambda x: (x * 2 + 1).softmax(-1), torch.randn(3, 4))
    assert report.counters.tir_kernels > before + 1
