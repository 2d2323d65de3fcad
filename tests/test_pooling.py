"""Pooling: windows of every kind, their indices and their gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fx2relax
from fx2relax.testing import assert_matches_eager

pytestmark = pytest.mark.sweep

NAN, INF = float("nan"), float("inf")


def _image(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("settings", [(2,), (3, 2, 1), (2, 3), (3, 1, 1, 2)], ids=str)
def test_largest(settings: tuple[int, ...]) -> None:
    def pools(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            F.max_pool1d(x, *settings),
            F.max_pool2d(y, *settings),
            F.max_pool3d(z, *settings),
            *F.max_pool1d_with_indices(x, *settings, ceil_mode=True),
            *F.max_pool2d_with_indices(y, *settings, ceil_mode=True),
            *F.max_pool3d_with_indices(z, *settings, ceil_mode=True),
        )

    inputs = _image(2, 3, 11), _image(2, 3, 9, 8), _image(2, 2, 7, 6, 8)
    assert_matches_eager(pools, *inputs, grad=True)
    unbatched = [x[0] for x in inputs]
    assert_matches_eager(pools, *unbatched)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64])
def test_largest_of_other_dtypes(dtype: torch.dtype) -> None:
    x = (_image(2, 3, 9, 8) * 10).to(dtype)
    assert_matches_eager(lambda x: F.max_pool2d_with_indices(x, 3, 2, 1), x)
    assert_matches_eager(lambda x: F.max_pool2d(x, 2, ceil_mode=True), x)


def test_bfloat16_is_widened_as_it_is_read() -> None:
    x = _image(2, 4, 16, 16).bfloat16()
    with torch.no_grad():
        report = fx2relax.explain(lambda x: F.max_pool2d(x, 2), x)
    assert len(report.data.kernels) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_largest_with_nan_infinities_and_ties(dtype: torch.dtype) -> None:
    rows = [[NAN, 1.0, NAN, 2.0], [-INF, -INF, INF, INF], [0.0, -0.0, 3.0, 3.0]]
    x = torch.tensor(rows, dtype=dtype)[None].repeat(1, 1, 2)
    assert_matches_eager(lambda x: F.max_pool1d_with_indices(x, 2), x)
    assert_matches_eager(lambda x: F.max_pool2d_with_indices(x[None], (3, 2), padding=1), x)
    assert_matches_eager(lambda x: F.adaptive_max_pool1d_with_indices(x, 3), x)


@pytest.mark.parametrize("padded", [True, False])
def test_mean(padded: bool) -> None:
    def pools(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            F.avg_pool1d(x, 3, 2, 1, count_include_pad=padded),
            F.avg_pool1d(x, 4, ceil_mode=True, count_include_pad=padded),
            F.avg_pool2d(y, (3, 2), (2, 1), 1, count_include_pad=padded),
            F.avg_pool2d(y, 3, 2, 1, ceil_mode=True, count_include_pad=padded),
            F.avg_pool2d(y, 2, divisor_override=3, count_include_pad=padded),
            F.avg_pool3d(z, 3, 2, 1, count_include_pad=padded),
            F.avg_pool3d(z, (2, 3, 2), ceil_mode=True, count_include_pad=padded),
        )

    inputs = _image(2, 3, 11), _image(2, 3, 9, 8), _image(2, 2, 7, 6, 8)
    assert_matches_eager(pools, *inputs, grad=True)
    assert_matches_eager(pools, *[x[0] for x in inputs])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_mean_of_other_dtypes(dtype: torch.dtype) -> None:
    x = _image(2, 3, 9, 8).to(dtype)
    assert_matches_eager(lambda x: (F.avg_pool2d(x, 3, 2, 1), F.avg_pool1d(x[0], 2)), x, grad=True)


def test_mean_of_integers_is_truncated() -> None:
    x = torch.tensor([[[-7, 2, -9, 4, 5, 6]]])
    assert_matches_eager(lambda x: F.avg_pool1d(x, 2), x)
    assert_matches_eager(lambda x: F.avg_pool2d(x[None], (1, 3)), x)


@pytest.mark.parametrize("size", [1, 3, 7])
def test_as_many_windows_as_outputs(size: int) -> None:
    def pools(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            F.adaptive_avg_pool1d(x, size),
            F.adaptive_avg_pool2d(y, (size, None)),
            F.adaptive_avg_pool3d(z, (size, 2, None)),
            *F.adaptive_max_pool1d_with_indices(x, size),
            *F.adaptive_max_pool2d_with_indices(y, (None, size)),
            *F.adaptive_max_pool3d_with_indices(z, (2, size, None)),
        )

    inputs = _image(2, 3, 7), _image(2, 3, 9, 8), _image(2, 2, 5, 6, 4)
    assert_matches_eager(pools, *inputs, grad=True)
    assert_matches_eager(pools, *[x[0].half() for x in inputs])


def test_power_means() -> None:
    def pools(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            F.lp_pool1d(x, 2, 3),
            F.lp_pool2d(y, 1.5, (2, 3), ceil_mode=True),
            F.lp_pool3d(z, 3, 2, 1),
        )

    inputs = _image(2, 3, 11).abs(), _image(2, 3, 9, 8).abs(), _image(2, 2, 7, 6, 8).abs()
    assert_matches_eager(pools, *inputs, grad=True)


def test_windows_at_random_places() -> None:
    samples = torch.rand(2, 3, 2), torch.rand(2, 2, 3)

    def pools(y: torch.Tensor, z: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> object:
        return (
            F.fractional_max_pool2d_with_indices(y, 2, (4, 5), _random_samples=a),
            F.fractional_max_pool3d_with_indices(z, 2, (3, 3, 4), _random_samples=b),
        )

    inputs = _image(2, 3, 9, 8).requires_grad_(), _image(2, 2, 7, 6, 8).requires_grad_()
    assert_matches_eager(pools, *inputs, *samples, grad=True)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_put_back(layout: torch.memory_format) -> None:
    x = _image(2, 3, 8, 6).to(memory_format=layout)
    values, indices = F.max_pool2d(x, 2, return_indices=True)

    def unpool(v: torch.Tensor, i: torch.Tensor) -> object:
        return F.max_unpool2d(v, i, 2), F.max_unpool2d(v, i, 2, output_size=[9, 7])

    assert_matches_eager(unpool, values, indices, grad=True)
    assert_matches_eager(lambda v, i: F.max_unpool2d(v, i, 2), values[0], indices[0])


def test_put_back_on_one_and_three_axes() -> None:
    x, z = _image(2, 3, 8), _image(2, 2, 4, 6, 4)
    x, i = F.max_pool1d(x, 2, return_indices=True)
    z, j = F.max_pool3d(z, 2, return_indices=True)
    both = lambda x, i, z, j: (F.max_unpool1d(x, i, 2), F.max_unpool3d(z, j, 2))  # noqa: E731
    assert_matches_eager(both, x, i, z, j, grad=True)


def test_put_back_out_of_range() -> None:
    values, indices = torch.ones(1, 1, 2, 2), torch.tensor([[[[0, 1], [2, 16]]]])
    compiled = torch.compile(lambda v, i: F.max_unpool2d(v, i, 2), backend="relax")
    with pytest.raises(RuntimeError, match="out of bounds"):
        compiled(values, indices)


def test_symbolic_sizes() -> None:
    def pools(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            F.max_pool2d(x, 3, 2, 1),
            F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
            F.adaptive_avg_pool2d(x, (3, 2)),
            F.adaptive_max_pool2d(x, 2),
            F.adaptive_avg_pool2d(x, 1),
        )

    assert_matches_eager(pools, _image(2, 3, 9, 8), dynamic=True, grad=True)


def test_layouts_and_empty_batches() -> None:
    def pools(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            F.max_pool2d(x, 2),
            F.avg_pool2d(x, 3, 1, 1),
            F.adaptive_avg_pool2d(x, 2),
            F.adaptive_max_pool2d(x, 2),
            F.lp_pool2d(x, 2, 2),
        )

    x = _image(2, 3, 9, 8)
    assert_matches_eager(pools, x.to(memory_format=torch.channels_last), grad=True)
    assert_matches_eager(pools, x.transpose(2, 3))
    assert_matches_eager(pools, x[:, :, ::2, 1:])
    assert_matches_eager(pools, x[:0])
