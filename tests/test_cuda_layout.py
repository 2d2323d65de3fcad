"""Convolution nets on a GPU have their channels last, and nothing is copied that can be read."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import tvm
from cuda_cases import gpus_of, needs_gpu
from cuda_emulated import emulated
from cuda_models import as_on_gpu, exported, here, is_kept_on_disk, operators, run, there
from torch import nn
from torch.nn import functional as F
from tvm import relax

from fx2relax import devices, drafts, pipeline
from fx2relax.gpu_rewrites import rewritten
from fx2relax.options import Options
from fx2relax.pipeline.turns import join_turns
from fx2relax.runtime.compilers import find_compiler

pytestmark = pytest.mark.usefixtures("fresh")
OPTIONS = {"cache": False, "never_slower": False}
LAST = torch.channels_last
HALF = [torch.float16, torch.bfloat16]


class Net(nn.Module):
    """What stands between convolutions: sums, gates, windows, joined and shuffled channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8))
        self.wide = nn.Conv2d(8, 8, 3, padding=1)
        self.apart = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.gate = nn.Conv2d(8, 8, 1)
        self.joined = nn.Conv2d(16, 8, 1)
        self.norm, self.late = nn.GroupNorm(2, 8), nn.BatchNorm2d(8)
        self.scale = nn.Parameter(torch.rand(8, 1, 1))
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = F.max_pool2d(F.silu(self.stem(x)), 3, 2, 1)
        y = F.hardswish(self.apart(self.wide(x).relu())) * self.scale + x
        y = y * F.adaptive_avg_pool2d(self.gate(y), 1).sigmoid()
        z = self.joined(torch.cat([y, F.avg_pool2d(x, 3, 1, 1)], 1))
        z = F.interpolate(self.norm(z), scale_factor=2.0, mode="nearest")
        z = self.late(z.unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2)).relu()
        z = self.up(z).tanh()
        return self.head(z.mean((2, 3))), y, z


class Plain(nn.Module):
    """A ResNet of one block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8))
        self.first = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8))
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.stem(x).relu(), 3, 2, 1)
        x = (self.second(self.first(x).relu()) + x).relu()
        return self.head(F.hardswish(x).mean((2, 3)))


class Volumes(nn.Module):
    """Three axes of space."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(2, 4, 3, padding=1), nn.Conv3d(4, 4, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        return self.second(x).sigmoid() + x


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "net": (Net, (2, 3, 17, 18)),
    "plain": (Plain, (2, 3, 16, 15)),
    "volumes": (Volumes, (2, 2, 4, 5, 6)),
    "one pixel": (Plain, (1, 3, 1, 1)),
}


def _made(name: str, dtype: torch.dtype, last: bool) -> tuple[nn.Module, torch.Tensor]:
    make, shape = MODELS[name]
    model, x = make().eval(), torch.randn(shape)
    with torch.no_grad():
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.running_mean.uniform_(-1, 1)
                norm.running_var.uniform_(0.5, 2)
    if last:
        x = x.contiguous(memory_format=torch.channels_last_3d if x.dim() == 5 else LAST)
    return model.to(dtype), x.to(dtype)


def _lowered(model: nn.Module, x: torch.Tensor) -> tuple[Any, list[str], dict[str, str]]:
    """A model's main function on a GPU, its kernels, and what its torch calls are of."""
    with gpus_of(80):
        graph, specs = there(exported(model, x))
        draft = drafts.draft_of(graph, specs, Options(), True)
        target = devices.facts(draft.device)
        lowered = pipeline.lower(draft.imported.mod, target=target, lift_weights=True)
    main = lowered["main"]
    values = [b.value for block in main.body.blocks for b in block.bindings]
    kernels = [v.args[0].name_hint for v in values if _op(v) == "relax.call_tir"]
    names = {c.name: c.op_name.split(".")[1] for c in draft.imported.torch_calls.values()}
    return main, kernels, names


def _op(value: Any) -> str:
    return str(getattr(getattr(value, "op", None), "name", ""))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_halves_have_their_channels_last(dtype: torch.dtype) -> None:
    main, kernels, names = _lowered(*_made("plain", dtype, False))
    assert [k for k in kernels if "transpose" in k] == ["transpose"], "the input, once"
    convolved = 0
    for block in main.body.blocks:
        for binding in block.bindings:
            if _op(binding.value) != "relax.call_pure_packed":
                continue
            kind = names[str(binding.value.args[0].global_symbol)]
            if kind == "convolution_relu":
                convolved += 1
                assert int(binding.value.args[1].ty.shape[3]) in (3, 8)
                assert int(binding.value.args[2].ty.shape[3]) in (3, 8)
                assert int(binding.var.ty.shape[3]) == 8
    assert convolved == 3
    # Weights are laid out once.
    sizes = [tuple(int(s) for s in p.ty.shape) for p in main.params if len(p.ty.shape) == 4]
    assert sorted(sizes[1:]) == [(8, 3, 3, 3), (8, 3, 3, 8), (8, 3, 3, 8)]


def test_single_precision_lies_as_in_eager() -> None:
    model, x = _made("plain", torch.float32, False)
    _, kernels, _ = _lowered(model, x)
    assert "transpose" not in " ".join(kernels)
    assert "permute" not in operators(rewritten(*here(model, x)))
    model, x = _made("plain", torch.float32, True)
    main, kernels, _ = _lowered(model, x)
    assert "transpose" not in " ".join(kernels), "the input lies so"
    assert [int(s) for s in main.params[0].ty.shape] == [2, 16, 15, 3]
    assert "permute" in operators(rewritten(*here(model, x)))


def test_double_precision_stays_as_it_is() -> None:
    model, x = _made("plain", torch.float64, True)
    assert "permute" not in operators(rewritten(*here(model, x)))


@pytest.mark.sweep
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_rewritten_graph_gives_what_eager_gives(
    name: str, dtype: torch.dtype, last: bool
) -> None:
    """As near to what float64 gives as eager is."""
    model, x = _made(name, dtype, last)
    exact = copy.deepcopy(model).double()(x.double())
    graph, specs = here(model, x)
    results, expected = run(rewritten(graph, specs), specs, x), model(x)
    known = expected if isinstance(expected, tuple) else (expected,)
    wanted = exact if isinstance(exact, tuple) else (exact,)
    for result, eager, value in zip(results, known, wanted, strict=True):
        assert (result.dtype, result.shape) == (eager.dtype, eager.shape)
        apart = (eager.double() - value).abs().max()
        assert (result.double() - value).abs().max() <= 4 * apart + 1e-6


@pytest.mark.sweep
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_model_gives_what_eager_gives(name: str, dtype: torch.dtype, last: bool) -> None:
    model, x = _made(name, dtype, last)
    apart = 1e-4 if dtype is torch.float32 else 3e-2
    with as_on_gpu(), torch.no_grad():
        fast = torch.compile(model, backend="relax", fullgraph=True, options=OPTIONS)
        result, expected = fast(x), model(x)
        torch.testing.assert_close(result, expected, rtol=apart, atol=apart)
        for ours, eager in zip(_flat(result), _flat(expected), strict=True):
            assert ours.stride() == eager.stride()
        for parameter in model.parameters():
            parameter.mul_(0.9)
        torch.testing.assert_close(fast(x), model(x), rtol=apart, atol=apart)


def _flat(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, tuple) else [value]


@pytest.mark.skipif(find_compiler("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", ["net", "plain"])
def test_kernels_between_calls(name: str, tmp_path: Path) -> None:
    """The kernels' own text, and PyTorch's calls, on tensors with their channels last."""
    model, x = _made(name, torch.float16, False)
    with emulated(tmp_path) as gpu, as_on_gpu() as graphs, torch.no_grad():
        fast = torch.compile(model, backend="relax", fullgraph=True, options=OPTIONS)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-2, atol=1e-2)
    assert gpu.kernels
    assert "permute" in operators(graphs[0])


def test_sizes_that_are_not_known() -> None:
    model, _ = _made("plain", torch.bfloat16, False)
    with as_on_gpu() as graphs, torch.no_grad():
        fast = torch.compile(model, backend="relax", dynamic=True, options=OPTIONS)
        for batch, height in ((2, 17), (3, 21), (5, 30)):
            x = torch.randn(batch, 3, height, 19).bfloat16()
            torch.testing.assert_close(fast(x), model(x), rtol=3e-2, atol=3e-2)
    assert len(graphs) == 1
    assert "permute" in operators(graphs[0])


def test_training_lies_as_in_eager() -> None:
    model, x = _made("plain", torch.bfloat16, False)
    with as_on_gpu() as graphs:
        torch.compile(model.train(), backend="relax", options=OPTIONS)(x).sum().backward()
    assert graphs
    assert all(not n.startswith("convolution_relu") for g in graphs for n in operators(g))
    laid = [n for g in graphs for n in g.graph.nodes if n.target is torch.ops.aten.permute.default]
    assert [n for n in laid if list(n.args[1]) in ([0, 2, 3, 1], [0, 3, 1, 2])] == []


# -- operands and results that lie in another order ----------------------------------------------


def test_a_transposed_weight_is_read_as_it_lies() -> None:
    model, x = nn.Linear(8, 5).eval(), torch.randn(3, 8)
    main, kernels, _ = _lowered(model, x)
    assert kernels == []
    assert sorted(tuple(int(s) for s in p.ty.shape) for p in main.params) == [(3, 8), (5,), (5, 8)]


TURNED: dict[str, Callable[[torch.Tensor], Any]] = {
    "an operand": lambda x: x.exp().transpose(1, 2).cumsum(1),
    "an operand of two": lambda x: torch.bmm(x.exp(), x.transpose(1, 2)),
    "turned twice": lambda x: x.exp().permute(2, 0, 1).transpose(0, 1).cumsum(1),
    "back again": lambda x: x.exp().transpose(1, 2).transpose(1, 2).cumsum(1),
    "several results": lambda x: x.exp().permute(2, 0, 1).sort(0),
    "a complex one": lambda x: torch.fft.fft(x.transpose(1, 2)).real,
    "a draw": lambda x: torch.nn.functional.dropout(x.exp().transpose(1, 2), 0.5),
    "an argument": lambda x: x.mT.cumsum(1).exp(),
}


@pytest.mark.parametrize("name", TURNED)
def test_operands_and_results_in_any_order(name: str) -> None:
    function, x = TURNED[name], torch.randn(2, 3, 4)
    with as_on_gpu():
        fast = torch.compile(function, backend="relax", fullgraph=True, options=OPTIONS)
        torch.manual_seed(1)
        result = fast(x)
        torch.manual_seed(1)
        expected = function(x)
    for ours, eager in zip(_all(result), _all(expected), strict=True):
        torch.testing.assert_close(ours, eager)
        assert ours.stride() == eager.stride()


def _all(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def test_a_program_on_disk_reads_and_writes_the_same_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FX2RELAX_CACHE", "1")
    monkeypatch.setenv("FX2RELAX_CACHE_DIR", str(tmp_path))
    model, x = _made("plain", torch.bfloat16, False)
    is_kept_on_disk(model, x, {"rtol": 3e-2, "atol": 3e-2})


def test_transposes_of_transposes() -> None:
    x = relax.Var("x", relax.TensorType([2, 3, 4], "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            one = builder.emit(relax.op.permute_dims(x, [1, 2, 0]))
            same = builder.emit(relax.op.permute_dims(one, [2, 0, 1]))
            other = builder.emit(relax.op.permute_dims(one, None))
            result = builder.emit_output(relax.Tuple([same, other]))
        builder.emit_func_output(result)
    joined = join_turns(builder.get())["main"]
    values = [b.value for block in joined.body.blocks for b in block.bindings]
    turned = [v for v in values if _op(v) == "relax.permute_dims"]
    assert [[int(a) for a in v.attrs.axes] for v in turned] == [[0, 2, 1]]
    given = torch.randn(2, 3, 4)
    executable = relax.build(tvm.IRModule({"main": joined}), "llvm")
    machine = relax.VirtualMachine(executable, tvm.cpu())
    found = [torch.from_dlpack(r) for r in machine["main"](tvm.runtime.tensor(given.numpy()))]
    torch.testing.assert_close(found, [given, given.permute(1, 2, 0).permute(2, 1, 0)])


# -- on hardware -------------------------------------------------------------------------------


@pytest.mark.cuda
@needs_gpu
@pytest.mark.sweep
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_on_a_gpu(name: str, dtype: torch.dtype, last: bool) -> None:
    model, x = _made(name, dtype, last)
    model, x = model.cuda(), x.cuda()
    apart = {torch.float32: 1e-2, torch.float16: 2e-2, torch.bfloat16: 6e-2}[dtype]
    with mock.patch.dict(os.environ, {"FX2RELAX_CUDA": "1"}), torch.no_grad():
        fast = torch.compile(model, backend="relax", fullgraph=True, options=OPTIONS)
        for _ in range(2):
            result, expected = fast(x), model(x)
            torch.testing.assert_close(result, expected, rtol=apart, atol=apart)
            for ours, eager in zip(_flat(result), _flat(expected), strict=True):
                assert ours.stride() == eager.stride()
