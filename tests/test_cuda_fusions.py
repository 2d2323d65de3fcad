"""What follows products and convolutions on a GPU is in their calls of PyTorch's libraries."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from cuda_cases import gpus_of, needs_gpu
from cuda_models import as_on_gpu, exported, here, is_kept_on_disk, operators, run, there
from torch import nn
from torch.nn import functional as F

from fx2relax import devices, drafts, pipeline
from fx2relax.gpu_rewrites import rewritten
from fx2relax.options import Options

pytestmark = pytest.mark.usefixtures("fresh")
OPTIONS = {"cache": False, "never_slower": False}
FUSED = ("addmm_activation", "convolution_relu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


class Model(nn.Module):
    """Modules, and a function of them and of tensors."""

    def __init__(self, call: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.modules_of = nn.ModuleDict(modules)
        self.call = call

    def forward(self, *args: torch.Tensor) -> Any:
        """The function's result."""
        return self.call(SimpleNamespace(**self.modules_of), *args)


class Block(nn.Module):
    """A transformer's block as it stands in GPT-2: the tanh GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.LayerNorm(16)])
        self.heads, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.heads(self.norms[0](x)).unflatten(-1, (3, 2, 8))
        q, k, v = (heads[:, :, n].transpose(1, 2) for n in range(3))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norms[1](x)), approximate="tanh"))


class Residual(nn.Module):
    """A ResNet's block, with a convolution beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(6, 8, 3, 2, 1, bias=False)
        self.second = nn.Conv2d(8, 8, 3, 1, 1, bias=False)
        self.beside = nn.Conv2d(6, 8, 1, 2, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.norms[2](self.beside(x)))


def _lively(model: nn.Module) -> nn.Module:
    """A model for inference whose statistics are not those of a new one."""
    with torch.no_grad():
        for norm in model.modules():
            if isinstance(norm, (nn.BatchNorm2d, nn.BatchNorm3d)):
                norm.running_mean.uniform_(-1, 1)
                norm.running_var.uniform_(0.5, 2)
                if norm.affine:
                    norm.bias.uniform_(-1, 1)
                    norm.weight.uniform_(0.5, 2)
    return model.eval()


def _mlp() -> nn.Module:
    tanh = nn.GELU(approximate="tanh")
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), tanh, nn.Linear(16, 4))


def _volumes() -> nn.Module:
    layers = nn.Conv3d(3, 4, 3, dilation=2, padding=1), nn.BatchNorm3d(4), nn.ReLU()
    return nn.Sequential(*layers, nn.Conv3d(4, 6, (1, 2, 3), groups=2), nn.ReLU())


# A model, its argument's shape, the calls of PyTorch's that are left of it.
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str]]] = {
    "mlp": (_mlp, (5, 8), ["addmm_activation", "addmm_activation", "addmm"]),
    "rows": (_mlp, (2, 3, 8), ["addmm_activation", "addmm_activation", "addmm"]),
    "block": (
        Block,
        (2, 5, 16),
        [
            *("native_layer_norm", "addmm", "bmm", "_softmax", "bmm", "addmm"),
            *("native_layer_norm", "addmm_activation", "addmm"),
        ],
    ),
    "residual": (
        Residual,
        (2, 6, 9, 9),
        ["convolution_relu", "convolution", "convolution_relu"],
    ),
    "volumes": (_volumes, (2, 3, 7, 8, 9), ["convolution_relu", "convolution_relu"]),
}


def _calls(model: nn.Module, *args: torch.Tensor) -> tuple[list[str], list[str]]:
    """What a model's main function calls on a GPU: of PyTorch's, and kernels."""
    with gpus_of(80):
        graph, specs = there(exported(model, *args))
        draft = drafts.draft_of(graph, specs, Options(), True)
        target = devices.facts(draft.device)
        lowered = pipeline.lower(draft.imported.mod, target=target, lift_weights=True)
    names = {c.name: c.op_name.split(".")[1] for c in draft.imported.torch_calls.values()}
    found: tuple[list[str], list[str]] = [], []
    for block in lowered["main"].body.blocks:
        for binding in block.bindings:
            value = binding.value
            op = getattr(getattr(value, "op", None), "name", "")
            if op == "relax.call_pure_packed":
                found[0].append(names[str(value.args[0].global_symbol)])
            elif op == "relax.call_tir":
                found[1].append(value.args[0].name_hint)
    return found


@pytest.mark.parametrize("name", CASES)
def test_what_follows_a_call_is_in_it(name: str) -> None:
    make, shape, wanted = CASES[name]
    calls, kernels = _calls(_lively(make()), torch.randn(shape))
    assert calls == wanted
    left = " ".join(kernels)
    assert "relu" not in left
    assert "gelu" not in left
    assert "tanh" not in left
    if name != "block":  # its kernels add what went around the products
        assert "add" not in left


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_rewritten_graph_gives_what_eager_gives(name: str, dtype: torch.dtype) -> None:
    """As near to what float64 gives as eager is, but for a few roundings of weights."""
    make, shape, _ = CASES[name]
    model, x = _lively(make()), torch.randn(shape)
    exact = copy.deepcopy(model).double()(x.double())
    model, x = model.to(dtype), x.to(dtype)
    graph, specs = here(model, x)
    fused = rewritten(graph, specs)
    assert set(operators(fused)) & set(FUSED)
    (result,), expected = run(fused, specs, x), model(x)
    assert result.dtype == expected.dtype
    assert result.stride() == expected.stride()
    apart = (expected.double() - exact).abs().max()
    assert (result.double() - exact).abs().max() <= 4 * apart + 1e-6
    if dtype is torch.float32:
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_model_gives_what_eager_gives(name: str) -> None:
    make, shape, _ = CASES[name]
    model, x = _lively(make()), torch.randn(shape)
    with as_on_gpu() as graphs, torch.no_grad():
        fast = torch.compile(model, backend="relax", fullgraph=True, options=OPTIONS)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
        assert set(operators(graphs[0])) & set(FUSED)
        for parameter in model.parameters():  # folded weights are made again
            parameter.mul_(0.5)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_program_on_disk_makes_the_same_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FX2RELAX_CACHE", "1")
    monkeypatch.setenv("FX2RELAX_CACHE_DIR", str(tmp_path))
    model, x = _lively(Residual()), torch.randn(2, 6, 9, 9)
    is_kept_on_disk(model, x, {"rtol": 1e-4, "atol": 1e-5})


def test_sizes_that_are_not_known() -> None:
    model = _mlp().eval()
    with as_on_gpu() as graphs, torch.no_grad():
        fast = torch.compile(model, backend="relax", dynamic=True, options=OPTIONS)
        for rows in (3, 5, 2):
            x = torch.randn(rows, 4, 8)
            torch.testing.assert_close(fast(x), model(x))
    assert len(graphs) == 1
    assert operators(graphs[0]).count("addmm_activation") == 2


def test_a_bias_that_is_added_by_itself_goes_into_its_product() -> None:
    model = Model(lambda m, x: m.a(x) + m.b.bias, a=nn.Linear(8, 16, False), b=nn.Linear(1, 16))
    for shape in ((5, 8), (2, 3, 8)):
        x = torch.randn(shape)
        graph, specs = here(model, x)
        fused = rewritten(graph, specs)
        assert "addmm" in operators(fused)
        assert not {"mm", "add"} & set(operators(fused))
        torch.testing.assert_close(run(fused, specs, x)[0], model(x))


def test_norms_without_weights_and_with_a_bias_before_them() -> None:
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False), nn.ConvTranspose2d(4, 4, 3)
    model = _lively(nn.Sequential(*layers, nn.BatchNorm2d(4)))
    x = torch.randn(2, 3, 6, 6)
    graph, specs = here(model, x)
    fused = rewritten(graph, specs)
    norms = operators(fused).count("_native_batch_norm_legit_no_training")
    assert norms == 1, "a transposed convolution has its output channels elsewhere"
    torch.testing.assert_close(run(fused, specs, x)[0], model(x), rtol=1e-4, atol=1e-5)


def _linear(**how: Any) -> nn.Linear:
    return nn.Linear(8, 8, **how)


def _conv(**how: Any) -> nn.Conv2d:
    return nn.Conv2d(4, 4, 3, padding=1, **how)


ROWS, IMAGES = (5, 8), (2, 4, 6, 6)
# What stays as it is: a function of a module and of tensors, the module, the tensors' shapes.
APART: dict[str, tuple[Callable[..., Any], Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "the GELU of erf": (lambda m, x: F.gelu(m.a(x)), _linear, [ROWS]),
    "another activation": (lambda m, x: F.silu(m.a(x)), _linear, [ROWS]),
    "read twice": (lambda m, x: (y := m.a(x)).relu() + y, _linear, [ROWS]),
    "returned as well": (lambda m, x: ((y := m.a(x)).relu(), y), _linear, [ROWS]),
    "no bias": (lambda m, x: m.a(x).relu(), lambda: _linear(bias=False), [ROWS]),
    "a matrix for a bias": (
        lambda m, x, y: torch.addmm(y, x, m.a.weight).relu(),
        _linear,
        [ROWS, ROWS],
    ),
    "alpha": (
        lambda m, x: torch.addmm(m.a.bias, x, m.a.weight, alpha=2).relu(),
        _linear,
        [ROWS],
    ),
    "double": (lambda m, x: m.a(x.double()).relu(), lambda: _linear().double(), [ROWS]),
    "a weight of the caller's": (
        lambda m, x, w: F.linear(x, w, m.a.bias).relu(),
        _linear,
        [ROWS, (8, 8)],
    ),
    "rows that are joined": (
        lambda m, x: m.a(x).view(10, 4).relu(),
        _linear,
        [ROWS],
    ),
    "no bias of a convolution": (lambda m, x: m.a(x).relu(), lambda: _conv(bias=False), [IMAGES]),
    "transposed": (
        lambda m, x: m.a(x).relu(),
        lambda: nn.ConvTranspose2d(4, 4, 3),
        [IMAGES],
    ),
    "one axis": (lambda m, x: m.a(x).relu(), lambda: nn.Conv1d(4, 4, 3), [(2, 4, 6)]),
    "double images": (lambda m, x: m.a(x.double()).relu(), lambda: _conv().double(), [IMAGES]),
    "each channel": (lambda m, x: m.a(x).relu(), lambda: _conv(groups=4), [IMAGES]),
    "a summand that is broadcast": (
        lambda m, x, y: (m.a(x) + y).relu(),
        _conv,
        [IMAGES, (4, 1, 1)],
    ),
    "alpha of a summand": (
        lambda m, x, y: torch.add(m.a(x), y, alpha=2).relu(),
        _conv,
        [IMAGES, IMAGES],
    ),
    "a sum with itself": (lambda m, x: ((y := m.a(x)) + y).relu(), _conv, [IMAGES]),
    "a sum read twice": (
        lambda m, x, y: (z := m.a(x) + y).relu() * z,
        _conv,
        [IMAGES, IMAGES],
    ),
}


@pytest.mark.parametrize("name", APART)
def test_what_stays_apart(name: str) -> None:
    function, make, shapes = APART[name]
    model, args = Model(function, a=make()).eval(), [torch.randn(s) for s in shapes]
    graph, specs = here(model, *args)
    fused = rewritten(graph, specs)
    assert not set(operators(fused)) & set(FUSED)
    assert operators(fused) == operators(graph)


@pytest.mark.parametrize("make", [_mlp, Residual])
def test_training_stays_apart(make: Callable[[], nn.Module]) -> None:
    model = make().train()
    x = torch.randn((5, 8) if make is _mlp else (2, 6, 9, 9))
    expected = copy.deepcopy(model)(x).square().sum()
    with as_on_gpu() as graphs:
        loss = torch.compile(model, backend="relax", options=OPTIONS)(x).square().sum()
        loss.backward()
    torch.testing.assert_close(loss, expected)
    assert len(graphs) == 2
    assert not {name for g in graphs for name in operators(g)} & set(FUSED)


def test_a_graph_is_left_as_it_was() -> None:
    graph, specs = here(_mlp().eval(), torch.randn(5, 8))
    before = graph.code
    rewritten(graph, specs)
    assert graph.code == before


# -- on hardware -------------------------------------------------------------------------------


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_model_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    make, shape, _ = CASES[name]
    model, x = _lively(make()).to("cuda", dtype), torch.randn(shape).to("cuda", dtype)
    with mock.patch.dict(os.environ, {"FX2RELAX_CUDA": "1"}), torch.no_grad():
        fast = torch.compile(model, backend="relax", fullgraph=True, options=OPTIONS)
        apart = {torch.float32: 1e-2, torch.float16: 2e-2, torch.bfloat16: 6e-2}[dtype]
        for _ in range(2):
            torch.testing.assert_close(fast(x), model(x), rtol=apart, atol=apart)
