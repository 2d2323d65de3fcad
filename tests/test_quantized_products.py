"""Products of dequantised tensors, which the pipeline computes with the integers themselves."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fx2relax
from fx2relax import pipeline
from fx2relax.pipeline.integer_kernels import Unit, unit_of
from fx2relax.pipeline.target import as_target
from fx2relax.quantized import operators as q
from fx2relax.testing import assert_matches_eager

HAS_UNIT = unit_of(as_target(None)) is not None
BYTES = {torch.uint8: (0, 255), torch.int8: (-128, 127)}


class Quantised(nn.Module):
    """Bytes as input, a weight of bytes with a scale for each output, and what follows."""

    def __init__(self, sizes: tuple[int, ...], points: int = 0, whole: bool = False) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(0)
        count = sizes[0]
        self.weight = nn.Buffer(torch.randint(-128, 128, sizes, generator=make).to(torch.int8))
        self.scale = nn.Buffer(torch.rand(count, generator=make) / 50 + 0.001)
        self.point = nn.Buffer(torch.randint(-points, points + 1, (count,), generator=make))
        self.bias = nn.Parameter(torch.randn(count, generator=make))
        self.whole = whole

    def floats(self) -> Tensor:
        if self.whole:
            return q.dequantize_per_tensor(self.weight, 0.02, 0, -128, 127, torch.int8)
        return q.dequantize_per_channel(
            self.weight, self.scale, self.point, 0, -128, 127, torch.int8
        )


class Linear(Quantised):
    def __init__(self, *args, zero: int = 110, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.zero = zero

    def forward(self, x: Tensor) -> Tensor:
        x = q.dequantize_per_tensor(x, 0.02, self.zero, *BYTES[x.dtype], x.dtype)
        return nn.functional.linear(x, self.floats(), self.bias)


class Conv(Quantised):
    def __init__(self, *args, zero: int = 3, **kwargs) -> None:
        super().__init__(*args)
        self.zero, self.kwargs = zero, kwargs

    def forward(self, x: Tensor) -> Tensor:
        x = q.dequantize_per_tensor(x, 0.02, self.zero, *BYTES[x.dtype], x.dtype)
        y = nn.functional.conv2d(x, self.floats(), self.bias, **self.kwargs).relu()
        return q.quantize_per_tensor(y, 0.5, 4, 0, 255, torch.uint8)


@pytest.fixture(autouse=True)
def fresh():
    """No size is taken for one that varies because another test had another one."""
    torch._dynamo.reset()


def data(dtype: torch.dtype, *sizes: int) -> Tensor:
    make = torch.Generator().manual_seed(1)
    low, high = BYTES[dtype]
    return torch.randint(low, high + 1, sizes, generator=make).to(dtype)


def lowered(model: nn.Module, x: Tensor) -> Any:
    """What a model becomes."""
    mod = fx2relax.from_fx(torch.export.export(model, (x,)).module(), [x])
    return pipeline.lower(mod, lift_weights=True)


def kernels(model: nn.Module, x: Tensor) -> list[str]:
    """The names of the kernels that a model becomes."""
    return [name.name_hint for name in lowered(model, x).get_global_vars()]


def check(model: nn.Module, x: Tensor) -> None:
    """Right, without a call into PyTorch, and by an integer product where there is one."""
    with torch.no_grad():
        whole = model(x).double().abs().max().item()
        assert_matches_eager(model, x, tol=(0.0, 1e-6 * whole + 1e-6))
    assert any("integer_product" in name for name in kernels(model, x)) == HAS_UNIT


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", BYTES, ids=str)
@pytest.mark.parametrize("points", [0, 5])
@pytest.mark.parametrize(
    ("sizes", "lead"),
    [
        ((64, 128), (3,)),
        ((70, 33), (100,)),
        ((5, 7), (1,)),
        ((48, 64), (2, 13)),
        ((33, 4), (2, 3, 5)),
    ],
)
def test_linear(dtype, points, sizes, lead):
    zero = 110 if dtype is torch.uint8 else -20
    check(Linear(sizes, points, zero=zero), data(dtype, *lead, sizes[1]))


def test_linear_with_one_scale():
    check(Linear((24, 20), whole=True), data(torch.uint8, 6, 20))


@pytest.mark.parametrize("dtype", BYTES, ids=str)
def test_extreme_bytes(dtype):
    """The longest sums, of bytes at the ends of their ranges, are exact."""
    zero, byte, low = (0, 255, -128) if dtype is torch.uint8 else (127, -128, 127)
    model = Linear((32, 4096), zero=zero).eval()
    model.weight.fill_(low)
    model.bias.data.zero_()
    x = torch.full((5, 4096), byte, dtype=dtype)
    exact = (byte - zero) * low * 4096 * model.scale.double() * 0.02
    with torch.no_grad():
        got = torch.compile(model, backend="relax")(x)
    bound = 3e-7 if HAS_UNIT else 1e-5
    torch.testing.assert_close(got.double(), exact.expand(5, 32), rtol=bound, atol=0)


def test_rows_of_any_number():
    model = Linear((40, 24), 3).eval()
    compiled = torch.compile(model, backend="relax", dynamic=True, fullgraph=True)
    fx2relax.reset_stats()
    with torch.no_grad():
        for rows in (30, 1, 7, 111):
            x = data(torch.uint8, rows, 24)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    assert fx2relax.stats()["nodes_fallback"] == 0


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", BYTES, ids=str)
@pytest.mark.parametrize(
    ("sizes", "image", "settings"),
    [
        ((8, 3, 3, 3), (2, 9, 11), {"padding": 1}),
        ((20, 5, 3, 2), (1, 8, 7), {"stride": (2, 1)}),
        ((40, 16, 1, 1), (2, 6, 6), {"stride": 2}),
        ((6, 4, 3, 3), (1, 12, 12), {"padding": (2, 1), "dilation": 2}),
        ((64, 3, 7, 7), (1, 20, 20), {"padding": 3, "stride": 2}),
        ((33, 8, 5, 1), (3, 9, 4), {"padding": (2, 0)}),
    ],
)
def test_convolution(dtype, sizes, image, settings):
    x = data(dtype, image[0], sizes[1], *image[1:])
    for points, zero in ((0, 3), (4, 100)):
        model = Conv(sizes, points, zero=zero, **settings)
        with torch.no_grad():
            want = model(x)
            got = torch.compile(model, backend="relax", fullgraph=True)(x)
        assert got.dtype == want.dtype
        off = (got.int() - want.int()).abs()
        # A tie that float32 rounds otherwise than the exact sum.
        assert off.max() <= 1
        assert (off > 0).float().mean() < 0.005
    assert any("integer_product" in name for name in kernels(model, x)) == HAS_UNIT


def test_images_of_any_number():
    model = Conv((8, 4, 3, 3), 2, padding=1)
    compiled = torch.compile(model, backend="relax", dynamic=True, fullgraph=True)
    with torch.no_grad():
        for count in (3, 2, 5):
            x = data(torch.uint8, count, 4, 6, 6)
            off = compiled(x).int() - model(x).int()
            assert off.abs().max() <= 1


@pytest.mark.parametrize("groups", [2, 4])
def test_groups_are_products_of_floats(groups):
    model = Conv((8, 4 // groups, 3, 3), groups=groups)
    x = data(torch.uint8, 1, 4, 6, 6)
    with torch.no_grad():
        off = torch.compile(model, backend="relax")(x).int() - model(x).int()
    assert off.abs().max() <= 1


@pytest.mark.skipif(not HAS_UNIT, reason="this processor has no integer products")
def test_short_vectors(monkeypatch):
    """What a processor with vectors of 256 bits runs."""
    integers = importlib.import_module("fx2relax.pipeline.integers")
    monkeypatch.setattr(integers, "unit_of", lambda target: Unit(8, 6, 2))
    monkeypatch.setenv("FX2RELAX_CACHE", "0")
    check(Linear((70, 33), 5), data(torch.uint8, 41, 33))


def test_no_unit(monkeypatch):
    """What a processor without the instruction runs."""
    integers = importlib.import_module("fx2relax.pipeline.integers")
    monkeypatch.setattr(integers, "unit_of", lambda target: None)
    monkeypatch.setenv("FX2RELAX_CACHE", "0")
    model, x = Linear((70, 33), 5), data(torch.uint8, 41, 33)
    assert not any("integer_product" in name for name in kernels(model, x))
    whole = model(x).abs().max().item()
    assert_matches_eager(model, x, tol=(0.0, 1e-6 * whole))


@pytest.mark.parametrize("dtype", BYTES, ids=str)
def test_int_mm(dtype):
    """Products of bytes in int32 are exact."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Buffer(data(torch.int8, 48, 36))

        def forward(self, x: Tensor) -> Tensor:
            return torch._int_mm(x, self.weight.t())

    if dtype is torch.int8:
        assert_matches_eager(Product(), data(dtype, 20, 36), tol=0)
        return
    x = data(dtype, 20, 36)
    got = torch.compile(Product(), backend="relax")(x)
    assert torch.equal(got, x.int() @ data(torch.int8, 48, 36).int().t())


class WeightOnly(nn.Module):
    """Floats by a weight of bytes, made floats in each of the ways that are met."""

    def __init__(self, way: str, columns: int = 24, depth: int = 64) -> None:
        super().__init__()
        self.way, self.depth = way, depth
        make = torch.Generator().manual_seed(2)
        self.weight = nn.Buffer(data(torch.int8, columns, depth))
        self.scale = nn.Buffer(torch.rand(columns, generator=make))
        self.scales = nn.Buffer(torch.rand(columns, depth // 16, generator=make))
        self.points = nn.Buffer(torch.randint(-9, 9, (columns, depth // 16), generator=make))

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        if self.way == "cast":
            return x @ w.t().to(x.dtype) * self.scale.to(x.dtype)
        if self.way == "turned":
            return x @ w.to(x.dtype).t() * self.scale.to(x.dtype)
        if self.way == "channel":
            w = q.dequantize_per_channel(w, self.scale, self.points[:, 0], 0, -128, 127, torch.int8)
        else:
            groups = w.reshape(-1, self.depth // 16, 16).to(torch.float32)
            points = self.points[..., None].to(torch.float32)
            w = ((groups - points) * self.scales[..., None]).reshape(w.shape)
        return nn.functional.linear(x, w)


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["cast", "turned", "channel", "groups"])
@pytest.mark.parametrize("lead", [(1,), (7,), (2, 5)], ids=str)
def test_weights_stay_bytes(way, lead):
    model = WeightOnly(way)
    x = torch.randn(*lead, 64, generator=torch.Generator().manual_seed(3))
    whole = model(x).abs().max().item()
    assert_matches_eager(model, x, tol=(0.0, 2e-6 * whole))
    assert any("byte_product" in name for name in kernels(model, x))
    x.flatten()[3], x.flatten()[20] = float("nan"), float("inf")
    assert_matches_eager(model, x, tol=(0.0, 2e-6 * whole))


@pytest.mark.parametrize("way", ["cast", "turned"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_stay_bytes_in_half_precision(way, dtype):
    model, x = WeightOnly(way), torch.randn(5, 64).to(dtype)
    bound = 2 * torch.finfo(dtype).eps
    assert_matches_eager(model, x, tol=(bound, bound * model(x).abs().max().item()))
    assert any("byte_product" in name for name in kernels(model, x))


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["cast", "turned", "channel", "groups"])
def test_no_float_copy_of_the_weight_is_kept(way):
    main = lowered(WeightOnly(way), torch.randn(5, 64))["main"]
    held = main.params[int(main.attrs["num_input"]) :]
    sizes = {
        str(p.ty.dtype): [int(s) for s in p.ty.shape.values]
        for p in held
        if math.prod(int(s) for s in p.ty.shape.values) >= 24 * 64
    }
    assert list(sizes) == ["int8"]


def test_weights_of_odd_sizes_stay_bytes():
    model = WeightOnly("cast", 7, 21)
    x = torch.randn(9, 21, generator=torch.Generator().manual_seed(3))
    assert_matches_eager(model, x, tol=(0.0, 2e-6 * model(x).abs().max().item()))


def test_changed_weights_are_seen():
    model = Linear((24, 20)).eval()
    compiled = torch.compile(model, backend="relax")
    x = data(torch.uint8, 6, 20)
    with torch.no_grad():
        compiled(x)
        model.weight.copy_(model.weight.flip(0))
        model.point.add_(2)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
