"""Padding in every mode, and what crops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fx2relax.testing import assert_matches_eager

pytestmark = pytest.mark.sweep

INF = float("inf")


def _ordered(*shape: int) -> torch.Tensor:
    count = 1
    for size in shape:
        count *= size
    return torch.arange(float(count)).view(shape) - count / 2


@pytest.mark.parametrize("value", [0.0, -1.5, INF, float("nan")])
def test_constant(value: float) -> None:
    def pads(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            F.pad(x, (1, 2), value=value),
            F.pad(x, (1, 0, 2, 3), value=value),
            F.pad(x, (0, 1, -1, 2), value=value),
            F.pad(x, (-1, -1, 1, -1, 0, 2), value=value),
            F.pad(x, (0, 0), value=value) * 2,
        )

    assert_matches_eager(pads, _ordered(2, 3, 4), grad=True)
    assert_matches_eager(pads, _ordered(2, 3, 4).transpose(0, 2))


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.bfloat16, torch.float64]
)
def test_constant_of_other_dtypes(dtype: torch.dtype) -> None:
    x = _ordered(3, 4).abs().to(dtype)
    big = 2**60 + 1 if dtype is torch.int64 else 3
    assert_matches_eager(lambda x: (F.pad(x, (1, 2)), F.pad(x, (1, -1, 0, 2), value=big)), x)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_borders(mode: str) -> None:
    def pads(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x[:, :, None].expand(-1, -1, 4, -1)
        z = y[:, :, None].expand(-1, -1, 3, -1, -1)
        return (
            F.pad(x, (2, 1), mode=mode),
            F.pad(x[0], (0, 3), mode=mode),
            F.pad(y, (1, 2, 3, 0), mode=mode),
            F.pad(y[0], (0, 0, 1, 2), mode=mode) if mode != "circular" else x,
            F.pad(z, (1, 2, 0, 1, 2, 2), mode=mode),
        )

    assert_matches_eager(pads, _ordered(2, 3, 5), grad=True)
    assert_matches_eager(pads, _ordered(2, 3, 5).bfloat16())
    assert_matches_eager(pads, _ordered(2, 3, 5), dynamic=True, grad=True)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_borders_that_crop(mode: str) -> None:
    def pads(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.pad(x, (-1, 2), mode=mode), F.pad(x[None], (1, -2, -1, 1), mode=mode)

    assert_matches_eager(pads, _ordered(2, 4, 5), grad=True)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_borders_of_images_in_other_layouts(mode: str) -> None:
    x = _ordered(2, 3, 4, 5)
    pad = lambda x: F.pad(x, (1, 2, 1, 1), mode=mode)  # noqa: E731
    assert_matches_eager(pad, x.to(memory_format=torch.channels_last), grad=True)
    assert_matches_eager(pad, x[..., 1:].transpose(2, 3))
    assert_matches_eager(pad, x[:0])


def test_symbolic_widths() -> None:
    def pads(x: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
        return (
            F.pad(x, (n, 1)),
            F.pad(x, (1, n), mode="reflect"),
            F.pad(x, (n, n), mode="replicate"),
            F.pad(x, (0, x.shape[-1]), value=2.0),
        )

    assert_matches_eager(pads, _ordered(2, 3, 5), 2, dynamic=True, grad=True)


def test_empty() -> None:
    assert_matches_eager(lambda x: (F.pad(x, (1, 1)), F.pad(x, (0, 0, 2, 0))), torch.ones(0, 3))
    assert_matches_eager(lambda x: F.pad(x, (1, 1)), torch.ones(0), grad=True)
    assert_matches_eager(lambda x: F.pad(x, (-1, -2)), torch.ones(2, 3))
