"""Normalisation in training and in eval, its statistics and gradients, against eager."""

import pytest
import torch
import torch.nn.functional as F
from special_values import seeded
from torch import nn

from fx2relax.testing import assert_matches_eager


def varied(module):
    """A module whose weights, biases and statistics are not the ones it starts with."""
    for k, tensor in enumerate([*module.parameters(), *module.buffers()]):
        if tensor.is_floating_point():
            tensor.data = seeded(*tensor.shape, seed=k).abs() + 0.5
    return module


MODULES = {
    "layer": (lambda: nn.LayerNorm(6), (2, 4, 6)),
    "layer over two axes": (lambda: nn.LayerNorm((4, 6), eps=1e-2), (2, 4, 6)),
    "layer without weights": (lambda: nn.LayerNorm(6, elementwise_affine=False), (2, 4, 6)),
    "layer without a bias": (lambda: nn.LayerNorm(6, bias=False), (3, 6)),
    "rms": (lambda: nn.RMSNorm(6), (2, 4, 6)),
    "rms with an eps": (lambda: nn.RMSNorm((4, 6), eps=1e-3), (2, 4, 6)),
    "group": (lambda: nn.GroupNorm(2, 4), (3, 4, 5, 2)),
    "group of one": (lambda: nn.GroupNorm(4, 4), (3, 4, 5)),
    "group without weights": (lambda: nn.GroupNorm(2, 4, affine=False), (3, 4, 5)),
    "batch 1d": (lambda: nn.BatchNorm1d(4), (6, 4)),
    "batch 2d": (lambda: nn.BatchNorm2d(4, momentum=0.3), (3, 4, 5, 2)),
    "batch 3d": (lambda: nn.BatchNorm3d(4, eps=1e-2), (2, 4, 2, 3, 2)),
    "batch without weights": (lambda: nn.BatchNorm2d(4, affine=False), (3, 4, 5, 2)),
    "batch, plain average": (lambda: nn.BatchNorm1d(4, momentum=None), (3, 4, 5)),
    "batch without statistics": (
        lambda: nn.BatchNorm2d(4, track_running_stats=False),
        (3, 4, 5, 2),
    ),
    "instance": (lambda: nn.InstanceNorm2d(4), (3, 4, 5, 2)),
    "instance with statistics": (
        lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        (3, 4, 5),
    ),
    "local response": (lambda: nn.LocalResponseNorm(3, alpha=0.1), (2, 6, 4, 3)),
}


class Twice(nn.Module):
    """A module applied to two inputs, so that its statistics are updated twice."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x), self.module(x * 2 + 1)


# Dynamo makes no whole graph of the plain average's factor; see the running statistics.
@pytest.mark.sweep
@pytest.mark.parametrize("name", [n for n in MODULES if "average" not in n])
def test_training(name):
    make, shape = MODULES[name]
    module = Twice(varied(make())).train()
    assert_matches_eager(module, seeded(*shape), grad=True, tol=(1e-4, 3e-5))


@pytest.mark.parametrize("name", [n for n in MODULES if "batch" in n or "statistics" in n])
def test_eval(name):
    make, shape = MODULES[name]
    assert_matches_eager(varied(make()).eval(), seeded(*shape), grad=True, tol=(1e-4, 3e-5))


@pytest.mark.parametrize("name", ["batch 2d", "batch, plain average", "instance with statistics"])
def test_running_statistics(name):
    make, shape = MODULES[name]
    eager, ours = varied(make()).train(), varied(make()).train()
    compiled = torch.compile(ours, backend="relax")
    for seed in range(3):
        x = seeded(*shape, seed=seed) * 3 + 1
        torch.testing.assert_close(compiled(x), eager(x), rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(ours.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["layer", "rms", "group", "batch 2d"])
def test_other_dtypes(name, dtype):
    make, shape = MODULES[name]
    module = varied(make()).to(dtype).eval()
    tol = 2e-2 if dtype.itemsize < 4 else None
    assert_matches_eager(module, seeded(*shape, dtype=dtype), tol=tol)


def test_large_means_spoil_nothing():
    def fn(x):
        return (
            F.layer_norm(x, (50,)),
            F.group_norm(x.view(4, 2, 25), 2),
            F.instance_norm(x.view(2, 2, 50)),
            F.batch_norm(x, None, None, training=True),
        )

    assert_matches_eager(fn, seeded(4, 50) + 500, tol=1e-2)


def test_layouts():
    x = seeded(2, 4, 6, 3)

    def fn(x):
        return F.group_norm(x, 2), F.instance_norm(x), F.layer_norm(x, x.shape[-1:])

    assert_matches_eager(fn, x.transpose(2, 3))
    channels_last = x.to(memory_format=torch.channels_last)
    assert_matches_eager(varied(nn.BatchNorm2d(4)).eval(), channels_last, grad=True)
    assert_matches_eager(varied(nn.BatchNorm2d(4)).train(), channels_last, grad=True, tol=1e-4)


def test_empty():
    def fn(x):
        return F.layer_norm(x, (4,)), F.rms_norm(x, (4,))

    assert_matches_eager(fn, torch.empty(0, 4), grad=True)


@pytest.mark.parametrize("name", ["layer", "rms", "group", "batch 2d"])
def test_sizes_change(name):
    make, shape = MODULES[name]
    module = varied(make()).eval()
    compiled = torch.compile(module, backend="relax", dynamic=True)
    for rows in (3, 7):
        x = seeded(rows, *shape[1:])
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-5)
