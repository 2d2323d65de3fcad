"""Assertions that a graph carries are kernels: they raise without PyTorch."""

from __future__ import annotations

import pytest
import torch
import tvm
from torch import nn
from tvm import relax

import fx2relax
from fx2relax.pipeline import build


class OneHot(nn.Module):
    def forward(self, index):
        return nn.functional.one_hot(index, 4)


class First(nn.Module):
    def forward(self, x, count):
        n = count.item()
        torch._check(n >= 1)
        torch._check(n <= 3)
        return x[:n] * n


@pytest.fixture(autouse=True)
def numbers_in_graphs():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


def imported(model, *inputs):
    mod = fx2relax.from_fx(torch.export.export(model, inputs))
    return relax.VirtualMachine(build(mod), tvm.cpu())["main"]


@pytest.mark.parametrize("door", ["import", "compile"])
def test_a_condition_on_a_tensor(door):
    model, index = OneHot(), torch.tensor([1, 3, 2])
    if door == "import":
        run = imported(model, index)
    else:
        run = torch.compile(model, backend="relax", fullgraph=True)
    fx2relax.reset_stats()
    assert torch.equal(run(index), model(index))
    assert fx2relax.stats()["nodes_fallback"] == 0
    with pytest.raises(RuntimeError, match="non-negative"):
        run(torch.tensor([1, -1, 2]))
    with pytest.raises(RuntimeError, match="smaller than num_classes"):
        run(torch.tensor([1, 4, 2]))


@pytest.mark.parametrize("door", ["import", "compile"])
def test_a_condition_on_a_number(door):
    model, x = First(), torch.randn(5)
    if door == "import":
        run = imported(model, x, torch.tensor(2))
    else:
        run = torch.compile(model, backend="relax", fullgraph=True)
    for n in (1, 3):
        assert torch.equal(run(x, torch.tensor(n)), model(x, torch.tensor(n)))
    with pytest.raises(RuntimeError, match="<= 3"):
        run(x, torch.tensor(4))
    with pytest.raises(RuntimeError, match=">= 1"):
        run(x, torch.tensor(0))
