"""What follows a product or a convolution joins its kernel, in a batch of one as in one of two."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fx2relax
from fx2relax.testing import assert_matches_eager

OPTIONS = {"library": "none", "never_slower": False}


class Residual(nn.Module):
    """A convolution, its input added, and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x) + x)


class Gated(nn.Module):
    """A product, and a number of each row that its columns are multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 40)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return torch.relu(self.linear(x)).clamp(max=2.0) * gate


def _conv(*rest: nn.Module, channels: int = 8, groups: int = 1) -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, channels, 3, padding=1, groups=groups), *rest).eval()


IMAGE, ROWS = (8, 12, 12), (24,)
MODELS: dict[str, tuple[nn.Module, list[tuple[int, ...]]]] = {
    "relu": (nn.Sequential(nn.Linear(24, 40), nn.ReLU()), [ROWS]),
    "leaky relu": (nn.Sequential(nn.Linear(24, 40), nn.LeakyReLU(0.2)), [ROWS]),
    "hardswish": (nn.Sequential(nn.Linear(24, 1), nn.Hardswish()), [ROWS]),
    "gate": (Gated(), [ROWS, (1,)]),
    "convolution": (_conv(nn.ReLU()), [IMAGE]),
    "normalised": (_conv(nn.BatchNorm2d(8), nn.ReLU6()), [IMAGE]),
    "depthwise": (_conv(nn.Hardswish(), groups=8), [IMAGE]),
    "one channel": (_conv(nn.ReLU(), channels=1), [IMAGE]),
    "residual": (Residual(), [IMAGE]),
}


def _inputs(name: str, batch: int) -> list[Tensor]:
    return [torch.randn(batch, *sizes) for sizes in MODELS[name][1]]


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_of_one_has_the_kernels_of_one_of_two(name: str) -> None:
    with torch.no_grad():
        one, two = (
            fx2relax.explain(MODELS[name][0], *_inputs(name, n), options=OPTIONS) for n in (1, 2)
        )
    assert [k.name for k in one.data.kernels] == [k.name for k in two.data.kernels]
    assert len(one.data.kernels) == 1


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_values(name: str, batch: int) -> None:
    with torch.no_grad():
        assert_matches_eager(MODELS[name][0], *_inputs(name, batch), options=OPTIONS)
