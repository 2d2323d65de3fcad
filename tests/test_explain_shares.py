"""Which line a kernel's time is put down to."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fx2relax


class Feed(nn.Module):
    """A product whose bias the next line's kernel adds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 96)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return F.gelu(y)


def test_a_kernel_that_adds_a_bias_is_not_put_down_to_the_product() -> None:
    data = fx2relax.explain(Feed().eval(), torch.randn(4, 32, 64)).data
    (graph,) = data.graphs
    product, both = (k for k in graph.kernels if "addmm" in k.nodes)
    assert product.operations == 2 * 4 * 32 * 64 * 96
    assert both.operations == 2 * 4 * 32 * 96  # the sum, and the function
    product.seconds, both.seconds = 3.0, 1.0
    spent = {line.code: seconds for line, seconds, _ in data.by_line()}
    assert spent["y = self.linear(x)"] == pytest.approx(3.5)
    assert spent["return F.gelu(y)"] == pytest.approx(0.5)
