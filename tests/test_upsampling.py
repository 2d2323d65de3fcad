"""Upsampling, with and without smoothing, and sampling by a grid; their gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from networks.check import export, run_without_torch
from tvm.relax.frontend import detach_params

import fx2relax
from fx2relax.testing import assert_matches_eager, close

pytestmark = pytest.mark.sweep


def data(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(0)
    if dtype is torch.uint8:
        return torch.randint(0, 256, sizes, dtype=dtype)
    return torch.randn(sizes).to(dtype)


LINE, PLANE, VOLUME = data(2, 3, 7), data(2, 3, 5, 7), data(1, 2, 3, 4, 5)


def lines(x):
    return (
        F.interpolate(x, scale_factor=2.3),
        F.interpolate(x, size=4, mode="nearest-exact"),
        F.interpolate(x, size=19, mode="linear"),
        F.interpolate(x, scale_factor=0.4, mode="linear", align_corners=True),
    )


def planes(x):
    return (
        F.interpolate(x, size=(13, 4)),
        F.interpolate(x, size=(11, 3), mode="nearest-exact"),
        F.interpolate(x, scale_factor=1.7, mode="bilinear"),
        F.interpolate(x, scale_factor=1.7, mode="bilinear", recompute_scale_factor=True),
        F.interpolate(x, size=(1, 9), mode="bilinear", align_corners=True),
        F.interpolate(x, size=(5, 7), mode="bilinear"),
        F.interpolate(x, scale_factor=(0.6, 2.5), mode="bicubic"),
        F.interpolate(x, size=(9, 3), mode="bicubic", align_corners=True),
    )


def volumes(x):
    return (
        F.interpolate(x, scale_factor=(1.7, 2, 0.5)),
        F.interpolate(x, size=(5, 2, 6), mode="nearest-exact"),
        F.interpolate(x, scale_factor=1.5, mode="trilinear"),
        F.interpolate(x, size=(2, 7, 5), mode="trilinear", align_corners=True),
    )


def smooth(x):
    """Narrower, wider and by given scales, whose filters are as wide as the scale."""
    return (
        F.interpolate(x, size=(2, 13), mode="bilinear", antialias=True),
        F.interpolate(x, scale_factor=(0.3, 0.7), mode="bilinear", antialias=True),
        F.interpolate(x, size=(3, 2), mode="bicubic", antialias=True),
        F.interpolate(x, size=(9, 3), mode="bicubic", antialias=True, align_corners=True),
    )


def bytes_too(x):
    return (*smooth(x)[::2], F.interpolate(x, scale_factor=1.7), planes(x)[2], planes(x)[6])


def few(x):
    """One of each kind of kernel."""
    return (
        F.interpolate(x, scale_factor=1.7),
        F.interpolate(x, scale_factor=1.7, mode="bilinear"),
        F.interpolate(x, size=(9, 3), mode="bicubic", align_corners=True),
        F.interpolate(x, size=(3, 9), mode="bilinear", antialias=True),
    )


ROWS = [(lines, LINE), (planes, PLANE), (volumes, VOLUME), (smooth, PLANE)]


@pytest.mark.parametrize(("fn", "x"), ROWS)
def test_values_and_gradients(fn, x):
    assert_matches_eager(fn, x, grad=True)


@pytest.mark.parametrize(("fn", "x"), ROWS)
def test_symbolic_sizes(fn, x):
    assert_matches_eager(fn, x, dynamic=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes(dtype):
    assert_matches_eager(lambda x: planes(x)[::3], PLANE.to(dtype))


@pytest.mark.parametrize("dynamic", [False, True])
def test_bytes_are_rounded_as_eager_rounds_them(dynamic):
    assert_matches_eager(bytes_too, data(2, 3, 11, 14, dtype=torch.uint8), dynamic=dynamic)


def test_sizes_change_without_compiling_again():
    torch._dynamo.reset()
    fn = torch.compile(few, backend="relax", dynamic=True, fullgraph=True)
    before = fx2relax.stats()["graphs"]
    for sizes in ((2, 3, 5, 7), (3, 2, 8, 4), (2, 5, 13, 6)):
        x = data(*sizes)
        for got, wanted in zip(fn(x), few(x), strict=True):
            close(got, wanted)
    assert fx2relax.stats()["graphs"] == before + 1


def test_the_nearest_of_many_sizes_is_the_one_eager_takes():
    def every(x):
        sizes = range(1, 90, 4)
        return [F.interpolate(x, n, mode=m) for m in ("nearest", "nearest-exact") for n in sizes]

    assert_matches_eager(every, torch.arange(41.0).view(1, 1, 41))


def test_layouts():
    last = PLANE.contiguous(memory_format=torch.channels_last)
    assert_matches_eager(lambda x: (*few(x), *few(x[:, 1:, :, 1:])), last)


def test_not_a_number_and_infinities():
    x = PLANE.clone()
    x[0, 0, 1, 2], x[1, 1, 3, 3], x[1, 2, 0, 0] = float("nan"), float("inf"), float("-inf")
    assert_matches_eager(lambda x: (*few(x), F.interpolate(x, (5, 7), mode="bilinear")), x)


def test_smoothing_of_half_precision_is_refused_as_in_eager():
    fn = torch.compile(few, backend="relax")
    with pytest.raises(NotImplementedError, match="not implemented for 'Half'"):
        fn(PLANE.half())


def test_an_empty_batch():
    assert_matches_eager(few, PLANE[:0])


def test_errors_are_eagers():
    fn = torch.compile(lambda x: F.interpolate(x, 3), backend="relax")
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        fn(PLANE.long())


def test_exported_and_run_without_pytorch():
    class Up(torch.nn.Module):
        def forward(self, x):
            return few(x)

    mod, _ = detach_params(fx2relax.from_fx(export(Up(), (PLANE,), {}), [PLANE]))
    got = run_without_torch(mod, {"main": []}, [PLANE])
    for one, wanted in zip(got, few(PLANE), strict=True):
        close(one, wanted)


GRID = torch.rand(2, 4, 3, 2, generator=torch.Generator().manual_seed(1)) * 2.8 - 1.4
GRID_3D = torch.rand(1, 3, 2, 4, 3, generator=torch.Generator().manual_seed(1)) * 2.8 - 1.4


@pytest.mark.parametrize(
    ("padding", "corners"),
    [("zeros", False), ("border", True), ("reflection", False), ("reflection", True)],
)
def test_grids(padding, corners):
    settings = {"padding_mode": padding, "align_corners": corners}

    def sample(x, grid, volume, grid_3d):
        modes = ("bilinear", "nearest", "bicubic") if not corners else ("bilinear",)
        planes = [F.grid_sample(x, grid, m, **settings) for m in modes]
        return [*planes, *[F.grid_sample(volume, grid_3d, m, **settings) for m in modes[:2]]]

    assert_matches_eager(sample, PLANE, GRID, VOLUME, GRID_3D, grad=True)


def test_grids_of_symbolic_sizes():
    def sample(x, grid, volume, grid_3d):
        return F.grid_sample(x, grid, align_corners=False), F.grid_sample(
            volume, grid_3d, align_corners=True
        )

    assert_matches_eager(sample, PLANE, GRID, VOLUME, GRID_3D, dynamic=True, grad=True)


def test_grids_without_numbers():
    grid = GRID_3D.clone()
    grid[0, 0, 0, 0, 0], grid[0, 1, 0, 0, 1] = float("nan"), float("inf")
    assert_matches_eager(lambda x, g: F.grid_sample(x, g, align_corners=False), VOLUME, grid)


def test_affine_grids():
    def transform(theta, x):
        grids = [F.affine_grid(theta, (2, 3, 4, 6), align_corners=a) for a in (False, True)]
        return [F.grid_sample(x, g, align_corners=False) for g in grids]

    assert_matches_eager(transform, data(2, 2, 3), PLANE, grad=True)
    volume = data(1, 3, 4)
    assert_matches_eager(lambda t: F.affine_grid(t, (1, 2, 3, 4, 5), align_corners=False), volume)


def test_multilabel_margin_loss_stops_at_the_first_missing_label():
    target = torch.tensor([[3, 0, -1, 1], [-1, 2, 2, 2], [1, -1, 0, -1]])
    assert_matches_eager(
        lambda x: F.multilabel_margin_loss(x, target, reduction="none"), data(3, 4), grad=True
    )


def test_smoothing_reads_nothing_outside_of_the_input() -> None:
    memory = torch.full((3, 2, 16, 32), torch.nan)
    memory[1] = torch.randn(2, 16, 32)
    assert_matches_eager(
        lambda x: F.interpolate(x, scale_factor=(1.7, 0.9), mode="bilinear", antialias=True),
        memory[1:2],
    )
