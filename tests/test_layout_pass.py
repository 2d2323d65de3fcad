"""Channels last in convolution nets: where layouts change, and that nothing else does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import tvm
from torch import Tensor, nn
from tvm import relax

import fx2relax
from fx2relax.pipeline.batch_norm import fold_scales
from fx2relax.pipeline.cut import Labels
from fx2relax.pipeline.library import use_library
from fx2relax.pipeline.relaid import use_channels_last
from fx2relax.testing import assert_matches_eager, assert_same_call

LAST = torch.channels_last


def conv(inputs: int, outputs: int, kernel: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **options)


def normed(*args: Any, **options: Any) -> nn.Sequential:
    """A convolution and a BatchNorm that is not the identity."""
    layer = conv(*args, **options)
    norm = nn.BatchNorm2d(layer.out_channels)
    for tensor in (norm.running_mean, norm.weight, norm.bias):
        nn.init.normal_(tensor)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    return nn.Sequential(layer, norm)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = normed(3, 8), normed(8, 8), normed(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        return F.relu(x + self.b(F.relu(self.a(x))))


class Gated(nn.Module):
    """Squeeze-excite behind a depthwise convolution, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.each = normed(3, 16, 1), normed(16, 16, 5, groups=16, stride=2)
        self.down, self.gate = conv(16, 4, 1), conv(4, 16, 1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.each(F.hardswish(self.up(x))))
        gate = F.hardsigmoid(self.gate(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))
        return self.head((x * gate).mean((2, 3)))


class Pools(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(3, 8), conv(8, 8, dilation=2), conv(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.a(x)), 3, 2, 1)
        x = F.avg_pool2d(self.b(x), 2, 1, 1, count_include_pad=False)
        x = self.c(F.adaptive_max_pool2d(x, 5))
        return F.adaptive_avg_pool2d(x, (3, 2)).flatten(1)


class Hourglass(nn.Module):
    """A U-Net in little: skips, both ways up, an edge that is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = normed(3, 8), normed(8, 16), normed(24, 8)
        self.up, self.head = nn.ConvTranspose2d(8, 8, 2, 2), conv(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.a(x))
        b = F.relu(self.b(F.max_pool2d(a, 2)))
        b = F.interpolate(b, scale_factor=2.0, mode="bilinear", align_corners=False)
        x = self.up(F.relu(self.c(torch.cat([a, b], 1))))
        return self.head(F.pad(x, (1, 0, 0, 2)))


class Shuffled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch, self.end = normed(3, 8), normed(4, 4), normed(8, 8, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.stem(x).chunk(2, 1)
        x = torch.cat([left, F.relu(self.branch(right))], 1)
        n, c, h, w = x.shape
        return self.end(x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w))


class Dense(nn.Module):
    """BatchNorm in front of the convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8)
        self.norms = nn.ModuleList(normed(1, n)[1] for n in (8, 12, 16))
        self.convs = nn.ModuleList(conv(n, 4) for n in (8, 12, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, layer in zip(self.norms, self.convs, strict=True):
            x = torch.cat([x, layer(F.relu(norm(x)))], 1)
        return x.flatten(1)


class Tokens(nn.Module):
    """Patches as tokens: the change of layout is what the net asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.patches = conv(3, 16), nn.Conv2d(16, 8, 4, 4)
        self.norm, self.back = nn.LayerNorm(8), conv(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(F.relu(self.stem(x)))
        n, c, h, w = x.shape
        x = self.norm(x.flatten(2).transpose(1, 2))
        return self.back(x.transpose(1, 2).contiguous().view(n, c, h, w))


NETS = [Residual, Gated, Pools, Hourglass, Shuffled, Dense, Tokens]


def seeded(make: Any) -> nn.Module:
    torch.manual_seed(0)
    return make().eval()


def structure(model: nn.Module, *inputs: Tensor) -> Counter[str]:
    """What a model's function consists of once its layout is chosen, before it is fused."""
    mod = fx2relax.from_fx(torch.export.export(model, inputs))
    mod = use_channels_last(use_library(fold_scales(mod)))
    found: Counter[str] = Counter()
    main = mod["main"]
    count = int(main.attrs["num_input"])
    given = set(main.params[:count])
    for block in main.body.blocks:
        for binding in block.bindings:
            value = binding.value
            if not given & set(relax.analysis.free_vars(value)):
                continue  # work on weights
            given.add(binding.var)
            if not isinstance(value, tvm.ir.Call):
                continue
            name = value.op.name
            if name == "relax.call_dps_packed":
                name = value.args[0].global_symbol.rpartition(".")[2]
            found[name.removeprefix("relax.")] += 1
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("make", NETS)
@pytest.mark.parametrize("batch", [1, 2])
def test_values(make, batch):
    with torch.no_grad():
        assert_matches_eager(seeded(make), torch.randn(batch, 3, 16, 16))


@pytest.mark.parametrize("make", [Residual, Hourglass, Gated])
def test_inputs_and_outputs_with_channels_last(make):
    with torch.no_grad():
        x = torch.randn(2, 3, 16, 16).to(memory_format=LAST)
        assert_matches_eager(seeded(make), x)
        assert_matches_eager(seeded(make).to(memory_format=LAST), x)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("make", [Residual, Gated, Hourglass])
def test_dynamic_sizes(make):
    torch._dynamo.reset()
    model = seeded(make)
    compiled = torch.compile(model, backend="relax", dynamic=True)
    with torch.no_grad():
        for shape in ((2, 3, 16, 16), (3, 3, 20, 24)):
            assert_same_call(compiled, model, torch.randn(shape))


def test_empty_batch():
    with torch.no_grad():
        assert_matches_eager(seeded(Residual), torch.randn(0, 3, 16, 16))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_no_numbers(value):
    """Relu and the largest of a window let NaN through, in either layout."""
    x = torch.randn(1, 3, 16, 16)
    x[0, 1, 5, 6] = value
    with torch.no_grad():
        assert_matches_eager(seeded(Pools), x)


@pytest.mark.parametrize(
    ("make", "transposed"),
    [(Residual, 2), (Gated, 1), (Hourglass, 2), (Shuffled, 3), (Tokens, 2)],
)
def test_layouts_change_at_the_edges(make, transposed):
    """One transposition in and, of an image, one out; a channel shuffle is one itself."""
    found = structure(seeded(make), torch.randn(1, 3, 16, 16))
    assert found["conv2d"] == 0
    assert found["conv2d_nhwc"] > 0
    assert found["permute_dims"] == transposed


def test_channels_last_need_no_transposition():
    """What comes and goes with channels last is passed as it lies."""

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Residual()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)

    found = structure(seeded(Between), torch.randn(1, 16, 16, 3))
    assert found["permute_dims"] == 0


def test_one_convolution_stays():
    """Two transpositions cost more than one convolution gains."""
    found = structure(seeded(lambda: conv(8, 8)), torch.randn(1, 8, 16, 16))
    assert found["conv2d"] == 1
    assert found["permute_dims"] == 0


def test_other_dtypes_stay():
    found = structure(seeded(Residual).double(), torch.randn(1, 3, 16, 16).double())
    assert found["conv2d"] == 3


def test_training_stays():
    torch.manual_seed(0)
    assert_matches_eager(Residual(), torch.randn(2, 3, 8, 8), grad=True, tol=(1e-4, 1e-4))


def test_batch_norm_is_folded():
    """Nothing of a BatchNorm is left behind a convolution, nor of statistics in front of one."""
    found = structure(seeded(Residual), torch.randn(1, 3, 16, 16))
    assert found["nn.batch_norm"] == 0
    # Three of relu, the sum, and a bias that is added where the sum is.
    assert found == {"conv2d_nhwc": 3, "call_tir": 5, "permute_dims": 2}


class Scaled(nn.Module):
    """Chains of numbers and of vectors behind products of every kind."""

    def __init__(self, layer: nn.Module, channels: int) -> None:
        super().__init__()
        self.layer = layer
        self.scale, self.shift = (nn.Parameter(torch.randn(channels)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        around = [-1, *[1] * (y.dim() - 2)]
        scale, shift = self.scale, self.shift
        if y.dim() > 2:
            scale, shift = scale.view(around), shift.view(around)
        return 2 - (y * scale - shift) / 3


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Conv1d(4, 6, 3), (2, 4, 9)),
        (lambda: nn.Conv2d(4, 6, 3, groups=2), (2, 4, 9, 9)),
        (lambda: nn.Conv3d(2, 6, 2), (2, 2, 5, 5, 5)),
        (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (2, 4, 5, 5)),
        (lambda: nn.Linear(5, 6), (3, 5)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chains_fold(layer, shape, dtype):
    torch.manual_seed(0)
    model = Scaled(layer(), 6).to(dtype).eval()
    x = torch.randn(shape, dtype=dtype)
    found = structure(model, x)
    assert found["multiply"] == found["divide"] == 0
    with torch.no_grad():
        assert_matches_eager(model, x)


def test_a_result_with_two_readers_does_not_fold():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = normed(3, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.layer(x)
            return self.norm(y), y.sigmoid()

    with torch.no_grad():
        assert_matches_eager(seeded(Both), torch.randn(2, 3, 8, 8))


def test_weights_that_change_are_folded_again():
    torch._dynamo.reset()
    model = seeded(Residual)
    compiled = torch.compile(model, backend="relax")
    x = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
        model.stem[1].running_var.mul_(3)
        model.a[0].weight.neg_()
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(20))
def test_the_cheapest_labels(seed):
    """A minimum cut costs what the best of all choices does."""
    generator = torch.Generator().manual_seed(seed)

    def number() -> float:
        return float(torch.rand((), generator=generator))

    single = {(n, label): number() for n in range(6) for label in (0, 1)}
    pairs = {(n, m): number() for n in range(6) for m in range(n)}
    labels = Labels()
    for (n, label), cost in single.items():
        labels.cost(n, label, cost)
    for (n, m), cost in pairs.items():
        labels.differ(n, m, cost)

    def cost(ones: set[Any]) -> float:
        own = sum(single[n, int(n in ones)] for n in range(6))
        return own + sum(c for (n, m), c in pairs.items() if (n in ones) != (m in ones))

    best = min(cost({n for n in range(6) if bits >> n & 1}) for bits in range(64))
    ones, total = labels.cheapest()
    assert total == pytest.approx(best)
    assert cost(ones) == pytest.approx(best)


class Mixed(nn.Module):
    """Layers with channels last between convolutions, as in ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv(8, 16), conv(16, 16, 7, groups=16)
        self.norm, self.wide, self.narrow = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.scale = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.norm(self.second(x).permute(0, 2, 3, 1))
        y = self.scale * self.narrow(F.gelu(self.wide(y)))
        return x + y.permute(0, 3, 1, 2)


@pytest.mark.parametrize("library", ["torch", "none"])
def test_kernels_of_both_layouts_fuse(library: str, caplog: pytest.LogCaptureFixture) -> None:
    model, x = Mixed().eval(), torch.randn(1, 8, 14, 14)
    with caplog.at_level("INFO", "fx2relax.pipeline.fuse"), torch.no_grad():
        options = {"library": library, "cache": False}
        got = torch.compile(model, backend="relax", options=options)(x)
    torch.testing.assert_close(got, model(x), rtol=1e-4, atol=1e-5)
    assert not caplog.messages
