"""Kernels for NVIDIA GPUs of one kind and another: their text, how they are launched, and nvcc."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm
from cuda_cases import gpus_of, graph_of, specs_of
from cuda_text import NVCC, Text, Translator, text_of
from torch.nn import functional
from tvm import te
from tvm.s_tir import dlight

from fx2relax import devices
from fx2relax.pipeline import cuda
from fx2relax.pipeline.as_written import as_written
from fx2relax.pipeline.launches import Launch, NoLaunch, check

FLOAT, HALF, BFLOAT = torch.float32, torch.float16, torch.bfloat16
LONG = torch.int64
Case = tuple[Callable[..., Any], list[Any], str]


def _chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x * 2 + y).tanh().where(y > 0, x.exp()) ** 2


def _normalised(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    out, mean, spread = torch.native_layer_norm(x, (96,), weight, bias, 1e-5)
    return out * mean * spread


def _image(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    x = functional.conv2d(x, weight, stride=2, padding=1)
    return functional.max_pool2d(functional.batch_norm(x, scale, scale).relu(), 2)


def _bags(ids: torch.Tensor, starts: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return functional.embedding_bag(ids, table, starts)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    first, second = x.flip(1).chunk(2, dim=-1)
    return torch.cat([-second, first], -1).transpose(1, 2) + functional.pad(
        x.cos(), (0, 0, 1, -1, -1, 1)
    )


def _cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for kind in (FLOAT, HALF, BFLOAT):
        name = str(kind).removeprefix("torch.")
        found[f"chain {name}"] = _chain, [(7, 130, kind), (130, kind)], "torch"
        found[f"softmax {name}"] = lambda x: x.softmax(-1), [(4, 300, kind)], "none"
        found[f"product {name}"] = torch.mm, [(96, 160, kind), (160, 128, kind)], "none"
    sizes: list[Any] = [(5, 96, HALF), (96, HALF), (96, HALF)]
    found["layer norm"] = _normalised, sizes, "none"
    found["sums"] = lambda x: x.sum() * x.sum(0) + x.mean(1, True), [(64, 2000, BFLOAT)], "torch"
    found["extremes"] = lambda x: x.amax(-1, True) + x.argmin(0), [(64, 100)], "none"
    found["moves"] = _rotated, [(2, 3, 3, 8)], "torch"
    found["image"] = _image, [(1, 3, 32, 32, HALF), (8, 3, 3, 3, HALF), (8, HALF)], "none"
    found["bags"] = _bags, [(12, LONG), (4, LONG), (20, 8)], "none"
    found["scan"] = lambda x: x.cumsum(-1).to(torch.int32), [(5, 40)], "none"
    found["sort"] = lambda x: x.sort(stable=True).values, [(5, 40, HALF)], "none"
    found["several launches"] = lambda x: x.softmax(0) * 2, [(5, 40, HALF)], "none"
    found["bits"] = torch.nextafter, [(5, 7, BFLOAT), (5, 7, BFLOAT)], "torch"
    found["few rows"] = torch.mv, [(5, 10), (10,)], "none"
    found["one step"] = lambda x: functional.rms_norm(x, (1,)).sum(0), [(1, 9, 1)], "none"
    return found


CASES = _cases()


def _text(name: str, arch: int = 80) -> Text:
    function, shapes, library = CASES[name]
    with gpus_of(arch):
        graph = graph_of(function, *shapes)
        return text_of(graph, specs_of(graph), library)


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_is_launched_as_gpus_launch(name: str) -> None:
    text = _text(name)
    assert text.kernels
    assert text.faults() == []


@pytest.mark.skipif(NVCC is None, reason="needs CUDA's compiler")
@pytest.mark.parametrize(("arch", "part"), [(80, 0), (90, 1), (100, 2)])
def test_nvcc_translates_a_kernel(arch: int, part: int, tmp_path: Path) -> None:
    """A third of them for each architecture: `sweep_cuda.py` has all for all."""
    translate = Translator(tmp_path)
    for name in list(CASES)[part::3]:
        text = _text(name, arch)
        made = translate(text, arch)
        assert made.keys() == text.kernels.keys()
        assert {kernel: m.error for kernel, m in made.items() if m.error} == {}


@pytest.mark.skipif(NVCC is None, reason="needs CUDA's compiler")
def test_fast_math_does_not_reach_elementary_functions(tmp_path: Path) -> None:
    """TVM compiles with it."""
    with gpus_of(90):
        graph = graph_of(lambda x: x.sin() + x.tanh() + x.log() + x**2.5, (40,))
        text = text_of(graph, specs_of(graph))
    source, made = tmp_path / "kernels.cu", tmp_path / "kernels.ptx"
    assert NVCC is not None
    for head, fast in ((text.head, False), (text.head.split("#ifdef __CUDACC__\n")[0], True)):
        source.write_text("\n".join([head, *text.kernels.values()]))
        command = [NVCC, "-arch=sm_90", "-ptx", "--use_fast_math", "-o", str(made), str(source)]
        subprocess.run(command, check=True, capture_output=True)
        approximate = [name for name in ("sin", "tanh") if f"{name}.approx" in made.read_text()]
        assert approximate == (["sin", "tanh"] if fast else [])


@pytest.mark.skipif(NVCC is None, reason="needs CUDA's compiler")
def test_what_nvcc_refuses_is_told_of_the_kernel(tmp_path: Path) -> None:
    good = _text("moves")
    names = list(good.kernels)
    bad = good.kernels[names[0]].replace("{", "{ nonsense;", 1)
    made = Translator(tmp_path)(Text(good.head, {**good.kernels, names[0]: bad}, []), 80)
    assert "nonsense" in made[names[0]].error
    assert [name for name in names if made[name].error] == names[:1]


def test_a_weight_whose_name_begins_with_a_digit() -> None:
    with gpus_of(80):
        graph = graph_of(lambda x, w: x + w.T, (3, 4), (4, 3))
        specs = specs_of(graph)
        specs[1].name, specs[1].kind = "0.weight", "parameter"
        text = text_of(graph, specs)
    assert "p0_weight_ptr" in "".join(text.kernels.values())
    assert " 0_weight" not in "".join(text.kernels.values())


def _doubled(scheduled: bool = False) -> tuple[Any, Any, Any]:
    """A kernel of two steps under its name, and the target."""
    x = te.placeholder((3000,), name="x")
    twice = te.compute((3000,), lambda i: x[i] + x[i], name="twice")
    total = te.compute((3000,), lambda i: twice[2999 - i] + twice[i], name="total")
    function = te.create_prim_func([x, total])
    with gpus_of(80):
        target = cuda.with_host(tvm.target.Target(devices.facts(torch.device("cuda", 0))))
    if scheduled:
        with target:
            mod = tvm.IRModule({"main": function})
            function = dlight.ApplyDefaultSchedule(dlight.gpu.Fallback())(mod)["main"]
    return tvm.ir.GlobalVar("main"), function, target


def test_what_no_gpu_launches() -> None:
    name, function, target = _doubled(scheduled=True)
    check(name, function, target)
    assert not [
        *Launch("k", {"blockIdx.x": 9, "threadIdx.x": 1024, "blockIdx.y": None}, 0).faults()
    ]
    for launch, why in (
        (Launch("k", {"threadIdx.x": 64, "threadIdx.y": 32}, 0), "2048 threads"),
        (Launch("k", {"blockIdx.y": 65536, "threadIdx.x": 1}, 0), "of at most 65535"),
        (Launch("k", {"blockIdx.x": 0}, 0), "blockIdx.x is 0"),
        (Launch("k", {"threadIdx.z": 65}, 0), "of at most 64"),
        (Launch("k", {"threadIdx.x": 1}, 50000), "50000 bytes"),
    ):
        (said,) = launch.faults()
        assert why in said


def test_a_schedule_that_no_gpu_launches_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    name, function, target = _doubled()

    class Wide(dlight.gpu.Fallback):
        """2048 threads in a block."""

        def apply(self, func: Any, target: Any, _: bool) -> Any:
            wide = {**dict(target.export()), "max_num_threads": 2048, "max_threads_per_block": 2048}
            return super().apply(func, tvm.target.Target(wide), _)

    monkeypatch.setattr(dlight.gpu, "Matmul", Wide)
    with target:
        bad = dlight.ApplyDefaultSchedule(Wide())(tvm.IRModule({"main": function}))["main"]
        with pytest.raises(NoLaunch, match="2048"):
            check(name, bad, target)
        check(name, cuda._scheduled(name, function, target), target)


def test_a_parallel_loop_that_no_schedule_takes_is_shared_among_threads() -> None:
    with gpus_of(80):
        graph = graph_of(torch.digamma, (40001,))
        text = text_of(graph, specs_of(graph), "none")
    (launch,) = (launch for launch in text.launches if launch.kernel == "digamma_kernel")
    assert launch.extents == {"blockIdx.x": 157, "threadIdx.x": 256}
    assert "< (int64_t)40001)" in text.kernels["digamma_kernel"]


def test_what_stands_before_a_parallel_loop_is_a_launch_of_its_own() -> None:
    with gpus_of(80):
        graph = graph_of(_bags, (600, LONG), (300, LONG), (20, 64))
        text = text_of(graph, specs_of(graph), "none")
    found = [n.extents for n in text.launches if n.kernel.startswith("embedding_bag")]
    assert found == [
        {"blockIdx.x": 1, "threadIdx.x": 1},
        {"blockIdx.x": 2, "threadIdx.x": 256},
    ]
    first, second = (text.kernels[f"embedding_bag_kernel{n}"] for n in ("", "_1"))
    assert "__trap" in first
    assert "__trap" not in second


def test_what_no_schedule_takes_runs_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    name, function, target = _doubled()
    with target:
        with pytest.raises(NoLaunch, match="without a thread"):
            check(name, function, target)
        monkeypatch.setattr(dlight, "ApplyDefaultSchedule", lambda rule: 1 // 0)
        made = cuda._scheduled(name, function, target)
        check(name, made, target)
    assert made.script() == as_written(function).script()
    assert made.script().count('thread="threadIdx.x"') == 2, "a launch for each step"
