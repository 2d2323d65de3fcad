"""Histograms over given and equal bins, in one and more dimensions, against eager."""

import pytest
import torch
from special_values import INF, NAN, seeded

import fx2relax
from fx2relax.compat import relax, tvm
from fx2relax.pipeline import build
from fx2relax.testing import assert_matches_eager


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_histogram(dtype):
    x = torch.tensor([1.0, 2.0, 2.0, 3.0, NAN, -1.0, INF, 0.3], dtype=dtype)
    edges = torch.tensor([0.0, 1.0, 2.0, 2.0, 3.0], dtype=dtype)

    def fn(x, edges):
        weight = x.abs()
        return [
            *torch.histogram(x[:4], 7),
            *torch.histogram(x[:1], 2),
            *torch.histogram(x[:0], 3),
            *torch.histogram(x, 10, range=(0.0, 3.0)),
            *torch.histogram(x, 4, range=(0.0, 3.0), weight=weight, density=True),
            *torch.histogram(x, edges),
            *torch.histogram(x, edges.flip(0)),
            *torch.histogram(x, edges[[0, 2, 1, 4]], weight=weight),
        ]

    assert_matches_eager(fn, x, edges)


def test_points():
    x, weight = seeded(3, 40, 2), seeded(3, 40, seed=1).abs()
    edges = [torch.tensor([-1.0, 0.0, 0.5]), torch.tensor([-1.0, 1.0])]

    def fn(x, weight, edges):
        return [
            torch.histogramdd(x, (4, 3)),
            torch.histogramdd(x, (2, 3), range=[0.0, 1.0, -1.0, 2.0], weight=weight, density=True),
            torch.histogramdd(x, edges, weight=weight),
            torch.histogramdd(x[:0], (2, 3)),
        ]

    assert_matches_eager(fn, x, weight, edges)


def test_sizes():
    def fn(x):
        return torch.histogram(x, 5), torch.histogramdd(x.reshape(-1, 2), (3, 2))

    assert_matches_eager(fn, seeded(6, 10))
    # PyTorch has no shape rule for them: with symbolic sizes its graph breaks.
    assert_matches_eager(fn, seeded(6, 10), dynamic=True, fullgraph=False)


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_range_that_is_not_finite_is_an_error(value):
    torch._dynamo.reset()
    fn = torch.compile(lambda x: torch.histogram(x, 3), backend="relax")
    with pytest.raises(RuntimeError, match="not finite"):
        fn(torch.tensor([1.0, value, 2.0]))


def test_without_the_library():
    class Count(torch.nn.Module):
        def forward(self, x):
            return torch.ops.aten.histogram.bin_ct(x, 5)

    x = seeded(40)
    mod = fx2relax.from_fx(torch.fx.symbolic_trace(Count()), [x])
    machine = relax.VirtualMachine(build(mod, library="none"), tvm.cpu())
    ours = machine["main"](tvm.runtime.tensor(x.numpy()))
    for value, expected in zip(ours, Count()(x), strict=True):
        torch.testing.assert_close(torch.from_numpy(value.numpy()), expected)
