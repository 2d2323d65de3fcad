"""Convolutions of one to three axes, plain and transposed, and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx2relax.testing import assert_matches_eager

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
SIZES = (9, 7, 5)


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + len(shape)))


def _tensors(axes: int, inner: int, outer: int, groups: int = 1) -> list[torch.Tensor]:
    return [
        _normal(2, inner, *SIZES[:axes]),
        _normal(outer, inner // groups, *(3, 2, 3)[:axes]),
        _normal(outer),
    ]


@pytest.mark.sweep
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"stride": 2, "padding": 1},
        {"padding": 1, "dilation": 2},
        {"stride": 3, "padding": 2, "dilation": 2},
        {"padding": "same", "dilation": 2},
        {"padding": "valid", "stride": 2},
    ],
    ids=str,
)
def test_plain(axes: int, settings: dict[str, Any]) -> None:
    x, w, b = _tensors(axes, 4, 6)
    assert_matches_eager(lambda *t: CONV[axes](*t, **settings), x, w, b, grad=True, tol=1e-4)


@pytest.mark.sweep
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"stride": 2, "padding": 1},
        {"stride": 2, "padding": 1, "output_padding": 1},
        {"stride": 3, "dilation": 2, "output_padding": 2},
        {"padding": 3},
        {"dilation": 2, "output_padding": 1},
    ],
    ids=str,
)
def test_transposed(axes: int, settings: dict[str, Any]) -> None:
    x, w, b = _tensors(axes, 4, 4)
    fn = TRANSPOSED[axes]
    assert_matches_eager(lambda *t: fn(*t, **settings), x, w, b, grad=True, tol=1e-4)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_groups(axes: int) -> None:
    x, w, b = _tensors(axes, 4, 8, groups=2)
    depthwise = _normal(4, 1, *(3, 2, 3)[:axes])
    spread = _normal(4, 3, *(3, 2, 3)[:axes])

    def function(*t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, w, b, depthwise, spread = t
        return (
            CONV[axes](x, w, b, 2, 1, groups=2),
            CONV[axes](x, depthwise, padding=1, groups=4),
            TRANSPOSED[axes](x, spread, None, 2, 1, 1, groups=2),
            TRANSPOSED[axes](x, depthwise, groups=4),
        )

    assert_matches_eager(function, x, w, b, depthwise, spread, grad=True, tol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    x, w, b = (t.to(dtype) for t in _tensors(2, 4, 6))

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, b, 2, 1)

    tol = 4e-2 if dtype is torch.bfloat16 else None
    assert_matches_eager(function, x, w, b, grad=True, tol=tol)
    assert_matches_eager(lambda x, w: F.conv1d(x[:, :, 0], w[:, :, 0]), x, w, tol=tol)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_integers(dtype: torch.dtype) -> None:
    x, w, b = ((t * 9).to(dtype) for t in _tensors(1, 4, 6))
    assert_matches_eager(lambda *t: F.conv1d(*t, padding=1), x, w, b)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_padding_modes(mode: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=(2, 1), padding_mode=mode),
        nn.Conv2d(4, 2, (5, 3), padding="same", padding_mode=mode, bias=False),
    )
    assert_matches_eager(net, _normal(2, 3, 8, 7), grad=True, tol=1e-4)


def test_without_a_batch() -> None:
    x, w, b = _tensors(2, 4, 4)

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.conv2d(x, w, b), F.conv_transpose2d(x, w, b, stride=2)

    assert_matches_eager(function, x[0], w, b, grad=True, tol=1e-4)


def test_layouts() -> None:
    x, w, b = _tensors(2, 4, 6)

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.conv2d(x, w, b, padding=1), F.conv2d(x, w).relu() + 1

    last = torch.channels_last
    assert_matches_eager(function, x.to(memory_format=last), w, b, grad=True, tol=1e-4)
    assert_matches_eager(function, x, w.to(memory_format=last), b, grad=True, tol=1e-4)
    assert_matches_eager(function, x.transpose(2, 3), w, b)
    assert_matches_eager(function, x[:, :, ::2, 1:], w, b)
    cube, kernel, _ = _tensors(3, 4, 6)
    cube = cube.to(memory_format=torch.channels_last_3d)
    assert_matches_eager(F.conv3d, cube, kernel)


def test_symbolic_sizes() -> None:
    x, w, b = _tensors(2, 4, 4)

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            F.conv2d(x, w, b, 2, 1),
            F.conv2d(x, w[..., :1], padding="same"),
            F.conv_transpose2d(x, w, b, 2, 1, 1),
        )

    assert_matches_eager(function, x, w, b, dynamic=True, grad=True, tol=1e-4)


def test_empty_batch() -> None:
    x, w, b = _tensors(2, 4, 4)

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.conv2d(x, w, b, padding=1), F.conv_transpose2d(x, w, b)

    assert_matches_eager(function, x[:0], w, b, grad=True)


def test_generated_kernels() -> None:
    x, w, b = _tensors(2, 4, 4, groups=2)

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, b, 2, 1, groups=2)

    assert_matches_eager(function, x, w, b, grad=True, tol=1e-4, options={"library": "none"})


def test_batch_in_the_middle() -> None:
    assert_matches_eager(
        lambda x, w, b: torch.conv_tbc(x, w, b, 1),
        *(_normal(7, 2, 3), _normal(3, 3, 4), _normal(4)),
        grad=True,
    )
