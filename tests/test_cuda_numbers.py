"""Kernels for NVIDIA GPUs give what eager gives: their text, run on the processor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_emulated import GPU, emulated
from cuda_text import parts
from test_cuda_codegen import CASES
from torch import nn
from torch.nn import functional as F

import fx2relax
from fx2relax.runtime import boundary
from fx2relax.runtime.compilers import find_compiler
from fx2relax.testing import assert_matches_eager

pytestmark = [
    pytest.mark.usefixtures("fresh"),
    pytest.mark.skipif(find_compiler("c++") is None, reason="needs a C++ compiler"),
]
OPTIONS: dict[str, Any] = {"cache": False, "never_slower": False, "library": "none"}


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[GPU]:
    with emulated(tmp_path) as found, warnings.catch_warnings():
        warnings.simplefilter("error")
        yield found


def _given(sizes: list[Any]) -> torch.Tensor:
    dtype = next((s for s in sizes if isinstance(s, torch.dtype)), torch.float32)
    shape = [s for s in sizes if isinstance(s, int)]
    if dtype.is_floating_point:
        return torch.rand(shape).to(dtype)
    return torch.randint(0, 4, shape, dtype=dtype).sort().values


def _both_ways(gpu: GPU, call: Callable[[], Any], expected: Any, **close: Any) -> None:
    for gpu.backwards in (False, True):
        torch.testing.assert_close(call(), expected, **close)


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_gives_what_eager_gives(gpu: GPU, name: str) -> None:
    function, shapes, _ = CASES[name]
    given = [_given(sizes) for sizes in shapes]
    fast = torch.compile(function, backend="relax", fullgraph=True, options=OPTIONS)
    with torch.no_grad():
        _both_ways(gpu, lambda: fast(*given), function(*given))
    assert gpu.kernels


class Attended(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(31, 32), nn.Embedding(9, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 48, 0.0, F.gelu, batch_first=True)
        self.head = nn.Linear(32, 31)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.block(x, src_mask=mask)).log_softmax(-1)


class Seen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        self.apart = nn.Conv2d(8, 8, 3, 1, 1, groups=8)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.GroupNorm(2, 8)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.norms[0](self.first(x)).relu(), 2)
        x = F.hardswish(self.norms[1](self.apart(x))) + x
        return self.head(F.interpolate(x, scale_factor=2, mode="bilinear").mean((2, 3)))


class Heard(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.LSTM(6, 10, 2, batch_first=True), nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)[0][:, -1])


NETWORKS: dict[str, tuple[type[nn.Module], Callable[[int], torch.Tensor]]] = {
    "attention": (Attended, lambda n: torch.randint(0, 31, (n, 7))),
    "images": (Seen, lambda n: torch.randn(n, 3, 17, 16)),
    "recurrent": (Heard, lambda n: torch.randn(n, 5, 6)),
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_gives_what_eager_gives(gpu: GPU, name: str) -> None:
    made, inputs = NETWORKS[name]
    model, x = made().eval(), inputs(2)
    fast = torch.compile(model, backend="relax", fullgraph=True, options=OPTIONS)
    with torch.no_grad():
        _both_ways(gpu, lambda: fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert gpu.kernels


_TRAINED = [pytest.param(n, marks=pytest.mark.whole) if n == "attention" else n for n in NETWORKS]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", _TRAINED)
def test_a_step_of_training_gives_what_eager_gives(gpu: GPU, name: str) -> None:
    made, inputs = NETWORKS[name]
    gpu.backwards = True
    assert_matches_eager(made(), inputs(3), grad=True, options=OPTIONS)
    assert gpu.kernels


def test_sizes_that_are_symbols(gpu: GPU) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).softmax(-1) * x.sum(1, keepdim=True) + x.amax() + (x[:, :6] * 2).softmax(0)

    w = torch.randn(10, 6)
    fx2relax.reset_stats()
    fast = torch.compile(function, backend="relax", dynamic=True, options=OPTIONS)
    for size in (3, 70, 130):
        x = torch.randn(size, 10)
        _both_ways(gpu, lambda x=x: fast(x, w), function(x, w))  # type: ignore[misc]
    assert fx2relax.stats()["graphs"] == 1


def test_a_size_that_turns_out_to_be_zero_launches_nothing(gpu: GPU) -> None:
    """CUDA refuses a grid without a block."""

    def function(x: torch.Tensor) -> Any:
        found = x.nonzero()
        return found * 2, (found + 0.5).softmax(0), (found * 1.5).exp().sum(1)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fast = torch.compile(function, backend="relax", fullgraph=True, options=OPTIONS)
        for x in (torch.ones(5, 3), torch.zeros(5, 3), torch.eye(3, 5)):
            _both_ways(gpu, lambda x=x: fast(x), function(x))  # type: ignore[misc]
    assert gpu.kernels


def test_an_index_beyond_the_end_stops_the_gpu(gpu: GPU) -> None:
    table, ids = torch.randn(4, 3), torch.tensor([1, 7])
    fast = torch.compile(F.embedding, backend="relax", options=OPTIONS)
    torch.testing.assert_close(fast(ids % 4, table), table[ids % 4])
    with pytest.raises(Exception, match=r"traps|out of range"):
        fast(ids, table)


def test_tensors_that_begin_where_no_vector_does(gpu: GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice, whose vectors a GPU would not read."""

    def product() -> Any:
        torch._dynamo.reset()
        return torch.compile(torch.mm, backend="relax", options=OPTIONS)

    whole, y = torch.randn(96 * 160 + 1), torch.randn(160, 128)
    aligned, x = (whole[n : n + 96 * 160].view(96, 160) for n in (0, 1))
    with pytest.raises(Exception, match="begins within another"):
        product()(x, y)
    monkeypatch.setitem(boundary.ALIGNED, "cpu", boundary.ALIGNED["cuda"])
    fast = product()
    for given in (aligned, aligned, x, x, aligned):
        torch.testing.assert_close(fast(given, y), given @ y)


def test_a_missing_barrier_is_seen(gpu: GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above would show nothing of races."""

    def without(source: str) -> Any:
        head, kernels = parts(source)
        assert any("__syncthreads();" in text for text in kernels.values())
        return head, {n: t.replace("__syncthreads();", "") for n, t in kernels.items()}

    monkeypatch.setattr("cuda_emulated.parts", without)
    x, y = torch.randn(96, 160), torch.randn(160, 128)
    fast = torch.compile(torch.mm, backend="relax", options=OPTIONS)
    with pytest.raises(AssertionError, match="not close"):
        _both_ways(gpu, lambda: fast(x, y), x @ y)
