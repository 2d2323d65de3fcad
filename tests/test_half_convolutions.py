"""Convolutions in half precision where oneDNN computes in it: channels last, packed weights."""

import copy

import pytest
import torch
from library_calls import lowered

from fx2relax import onednn
from fx2relax.runtime import native

pytestmark = pytest.mark.skipif(not native.use(), reason="no C++ compiler")


def distance(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.fixture(params=["bfloat16", "float16"])
def dtype(request):
    if not onednn.computes_in(request.param):
        pytest.skip(f"oneDNN does not compute in {request.param} on this processor")
    return getattr(torch, request.param)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3, padding=1),
        torch.nn.BatchNorm2d(32),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False),
        torch.nn.SiLU(),
        torch.nn.Conv2d(64, 64, 5, padding=2, groups=64),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(64, 320, 1),
    ).eval()


def test_an_autocast_net_is_as_close_as_eager_and_sees_its_weights(dtype, net, monkeypatch):
    x = torch.randn(2, 3, 30, 22)
    with torch.autocast("cpu", dtype):
        text, run = lowered(net, x, monkeypatch=monkeypatch, rtol=0.05, atol=0.05)
    assert text.count("library.packed_conv_nhwc") == 2  # few channels in; a group each
    assert "library.new_conv2d_nhwc" in text
    assert 'library.new_conv2d"' not in text
    for change in (1.0, 0.5):
        with torch.no_grad():
            net[3].weight.mul_(change)
            exact = copy.deepcopy(net).double()(x.double())
            with torch.autocast("cpu", dtype):
                ours, eager = run(x), net(x)
        assert ours.dtype == eager.dtype
        assert ours.stride() == eager.stride()
        assert distance(ours, exact) <= 1.5 * distance(eager, exact)


def test_a_net_of_that_dtype_with_any_batch(dtype, net):
    net = net.to(dtype)
    run = torch.compile(net, backend="relax", dynamic=True)
    for batch in (1, 3, 2):
        x = torch.randn(batch, 3, 17, 20).to(dtype)
        with torch.no_grad():
            exact = copy.deepcopy(net).double()(x.double())
            assert distance(run(x), exact) <= 1.5 * distance(net(x), exact)


def test_a_training_step_in_that_dtype(dtype, net):
    net.train()
    x = torch.randn(4, 3, 16, 16)
    gradients = []
    for make in (lambda m: m, lambda m: torch.compile(m, backend="relax"), lambda m: m.double()):
        model = copy.deepcopy(net)
        run = make(model)
        exact = next(model.parameters()).dtype == torch.float64
        with torch.autocast("cpu", dtype, enabled=not exact):
            loss = run(x.double() if exact else x).square().mean()
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten().double() for p in model.parameters()]))
    eager, ours, exact = gradients
    assert distance(ours, exact) <= 1.5 * distance(eager, exact)
