"""What surrounds kernels for a GPU, as far as it shows without one."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tvm
import tvm_ffi
from cuda_cases import ampere, graph_of, specs_of
from torch.nn.functional import embedding, layer_norm, linear

from fx2relax import backend, devices, drafts, pipeline, switches
from fx2relax.alternatives import Alternatives
from fx2relax.clocks import Clock
from fx2relax.errors import ArgumentError, BuildFailure
from fx2relax.graph_key import graph_key
from fx2relax.never_slower import Contest, Verdicts
from fx2relax.options import Options
from fx2relax.runtime import boundary
from fx2relax.runtime.weights import Weights
from fx2relax.taking_turns import Turns

__all__ = ["ampere"]
KIND = 2  # DLPack's of CUDA


# -- the device --------------------------------------------------------------------------------


def test_a_graph_on_a_gpu_has_to_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(switches.CUDA, raising=False)
    graph = graph_of(torch.relu, (2, 3))
    with pytest.raises(BuildFailure, match="FX2RELAX_CUDA=1"):
        devices.of_graph(graph)
    compiler = backend._Compiler(Options(), [], False)
    with caplog.at_level(logging.WARNING, "fx2relax"):
        call = compiler._compile(graph, specs_of(graph), "inference")
    (said,) = caplog.messages
    assert "runs in PyTorch" in said
    assert "FX2RELAX_CUDA=1" in said
    assert call([torch.tensor([-1.0, 2.0])])[0].tolist() == [0.0, 2.0]


@pytest.mark.usefixtures("ampere")
def test_the_device_of_a_graph() -> None:
    assert devices.of_graph(graph_of(torch.relu, (2,), device="cpu")) == torch.device("cpu")
    assert devices.of_graph(graph_of(torch.relu, (2,), device="cuda:3")).index == 3
    several = graph_of(lambda x, y: (x + 1, y + 1), (2,), (2, "cuda:1"))
    with pytest.raises(BuildFailure, match="several devices: cuda:0, cuda:1"):
        devices.of_graph(several)
    with pytest.raises(BuildFailure, match="no code generation"):
        devices.of_graph(graph_of(torch.relu, (2,), device="meta"))


@pytest.mark.usefixtures("ampere")
def test_each_kind_of_gpu_has_its_own_target_and_programs() -> None:
    first, second = (devices.facts(torch.device("cuda", i)) for i in (0, 1))
    assert first is not None
    assert second is not None
    assert (first["arch"], second["arch"]) == ("sm_80", "sm_90")
    target = tvm.target.Target(second)
    assert int(target.attrs["max_shared_memory_per_block"]) == 98304
    keys = set()
    for index in (0, 1):
        graph = graph_of(torch.relu, (2,), device="cuda:0")
        devices._cuda.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_capability", lambda _, i=index: (8 + i, 0))
            keys.add(graph_key(graph, specs_of(graph), Options()))
    assert len(keys) == 2


def test_nothing_of_cuda_is_there_for_the_processor() -> None:
    code = """
import sys, torch, fx2relax
torch.cuda._lazy_init = lambda: sys.exit(3)
print(torch.compile(lambda x: x.exp() @ x, backend="relax")(torch.ones(3, 3)).sum())
assert "fx2relax.runtime.cuda" not in sys.modules, "loaded"
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=300)


def test_an_argument_elsewhere_is_refused() -> None:
    (spec,) = specs_of(graph_of(torch.relu, (2,), device="cuda:1"))
    here = torch.ones(2)
    with pytest.raises(ArgumentError, match="is on cpu and not on cuda:1"):
        boundary.argument(spec, here)
    said = boundary.mismatch(spec, here, torch.device("cuda:1"))
    assert said is not None
    assert "expected a tensor on cuda:1" in said


# -- what runs in PyTorch ----------------------------------------------------------------------


def _calls(function: Callable[..., Any], *shapes: Any, library: str = "torch") -> list[str]:
    graph = graph_of(function, *shapes)
    draft = drafts.draft_of(graph, specs_of(graph), Options(library=library), False)
    return [c.op_name.split(".")[1] for c in draft.imported.torch_calls.values()]


@pytest.mark.usefixtures("ampere")
def test_what_runs_in_pytorch_on_a_gpu() -> None:
    square, long = (4, 4), (4, torch.int64)
    assert _calls(lambda x, w: linear(x, w).exp() @ x, square, square) == ["mm", "mm"]
    assert _calls(lambda x: x.sort().values.cumsum(0), square) == ["sort", "cumsum"]
    assert _calls(lambda i, w: embedding(i, w) + 1, long, square) == ["embedding"]
    assert _calls(lambda x, i: x.index_add(0, i, x), square, long) == ["index_add"]
    assert _calls(torch.linalg.cholesky, square)[0] == "linalg_cholesky_ex"
    assert _calls(lambda i: i // i, long) == ["floor_divide"]
    rows = lambda x: layer_norm(x.softmax(-1), (4,)).amax(0) / x.std()  # noqa: E731
    assert set(_calls(rows, square)) == {"_softmax", "native_layer_norm", "amax", "std"}
    found = _calls(lambda x: x.digamma() + torch.special.ndtri(x), square)
    assert found == ["digamma", "special_ndtri"]
    heads = (1, 2, 4, 8)
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    found = _calls(lambda q, k, v: attend(q, k, v, None, False)[0] + 1, heads, heads, heads)
    assert found == ["_scaled_dot_product_efficient_attention"]


@pytest.mark.usefixtures("ampere")
def test_products_whose_operands_have_to_lie_in_a_certain_way() -> None:
    """The second matrix of a scaled product in columns: cuBLAS has no other."""
    narrow = torch.float8_e4m3fn

    def scaled(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(x, w.t(), scale, scale, out_dtype=torch.bfloat16) * 2

    graph = graph_of(scaled, (32, 64, narrow), (48, 64, narrow), (torch.float32,))
    draft = drafts.draft_of(graph, specs_of(graph), Options(), False)
    (call,) = draft.imported.torch_calls.values()
    compact = [torch.zeros(n).to(narrow) for n in ((32, 64), (64, 48))]
    (x, w, *_), _ = call.arguments([*compact, torch.ones(()), torch.ones(())])
    assert (x.stride(), w.stride()) == ((64, 1), (1, 64))


@pytest.mark.usefixtures("ampere")
def test_what_is_generated_for_a_gpu() -> None:
    assert not _calls(lambda x: (x.exp().sum(-1) / x.mean()).sum(), (4, 4))
    assert not _calls(
        lambda x: layer_norm(x.softmax(-1), (4,)).sum() / x.std(), (4, 4), library="none"
    )
    assert not _calls(
        lambda x: torch.cat([x.T, x.narrow(0, 0, 2).sigmoid()]).flip(0) ** 2.0, (4, 4)
    )
    assert not _calls(lambda x: x.to(torch.float16) * 2 + torch.arange(4, device=x.device), (4,))
    assert not _calls(torch.mm, (4, 4), (4, 4), library="none")


@pytest.mark.usefixtures("ampere")
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs CUDA's compiler")
def test_a_graph_is_compiled_for_a_gpu() -> None:
    graph = graph_of(lambda x, w: ((x @ w).relu() @ w).sum(-1), (4, 4), (4, 4))
    draft = drafts.draft_of(graph, specs_of(graph), Options(), False)
    built = draft.compile("torch", None, "")
    assert built.census["tir_kernels"] >= 1
    assert [c.op_name for c in built.imported.torch_calls.values()] == ["aten.mm.default"] * 2
    target = devices.facts(draft.device)
    lowered = pipeline.lower(draft.imported.mod, target=target)
    ready, _ = pipeline.give(lowered, draft.imported.name, draft.imported.num_input)
    assert b"fx2relax.gpu.empty" in (pipeline.library_code(ready, target=target) or b"")


# -- streams -----------------------------------------------------------------------------------


class _Streams:
    """PyTorch's current GPU and stream, and what is asked of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 7
        self.said: list[Any] = []
        self.device = 0
        monkeypatch.setattr(torch.cuda, "device", self._device)
        monkeypatch.setattr(torch.cuda, "current_stream", self._stream)
        monkeypatch.setattr(torch.cuda, "Event", self._event)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        self.capturing = False

    @contextmanager
    def _device(self, device: torch.device) -> Any:
        before, self.device = self.device, device.index
        try:
            yield
        finally:
            self.device = before

    def _stream(self, device: Any = None) -> Any:
        number = self.now
        wait = lambda event: self.said.append(("wait", number))  # noqa: E731
        return SimpleNamespace(cuda_stream=number, wait_event=wait)

    def _event(self) -> Any:
        record = lambda stream: self.said.append(("record", stream.cuda_stream))  # noqa: E731
        return SimpleNamespace(record=record)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> _Streams:
    return _Streams(monkeypatch)


def test_a_call_is_on_its_gpu_and_pytorchs_stream(streams: _Streams) -> None:
    from fx2relax.runtime.cuda import Gpu

    raw = tvm_ffi.get_raw_stream

    def look(arguments: Any) -> Any:
        return [streams.device, raw(tvm_ffi.device("cuda:1")), *arguments]

    call = Gpu(torch.device("cuda:1")).entered(look)
    before = raw(tvm_ffi.device("cuda:1"))
    assert call((5,)) == [1, 7, 5]
    streams.now = 9
    assert call(()) == [1, 9]
    with pytest.raises(ZeroDivisionError):
        Gpu(torch.device("cuda:1")).entered(lambda _: [1 // 0])(())
    assert (streams.device, raw(tvm_ffi.device("cuda:1"))) == (0, before)


def test_what_one_stream_made_another_waits_for_once(
    streams: _Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fx2relax.runtime.cuda import Gpu

    record = lambda tensor, stream: streams.said.append(("keep", stream.cuda_stream))  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    enter = Gpu(torch.device("cuda:0")).streams([tvm_ffi.from_dlpack(torch.ones(3))])
    enter()
    assert streams.said == [("record", 7)]
    streams.now, streams.capturing = 8, True
    enter()
    assert streams.said == [("record", 7)]
    streams.capturing = False
    enter()
    enter()
    assert streams.said == [("record", 7), ("wait", 8), ("keep", 8)]


def test_what_a_capture_makes_of_weights_is_not_kept(streams: _Streams) -> None:
    """It is made when the graph is replayed, and a call outside of it may come before."""
    weight = torch.ones(3)
    (spec,) = specs_of(graph_of(torch.relu, (3,), device="cpu"))
    made: list[Any] = []

    def transform(weights: Any) -> Any:
        made.append(tvm_ffi.from_dlpack(torch.from_dlpack(weights[0]) * 2))
        return made[-1:]

    weights = Weights([spec], transform, lambda made: lambda: None)
    for capturing, count in ((True, 1), (True, 2), (False, 3), (False, 3), (True, 3)):
        streams.capturing = capturing
        assert weights.get([weight])[0].same_as(made[-1])
        assert len(made) == count
    weight.add_(1)
    assert not weights.get([weight])[0].same_as(made[2])
    streams.capturing = False
    weights.get([weight])
    assert len(made) == 5


# -- the clock -----------------------------------------------------------------------------------


class _Events(_Streams):
    """Events that know what the clock said when they were recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.milliseconds = 0.0

    def _stream(self, device: Any = None) -> Any:
        stream = super()._stream(device)
        stream.synchronize = lambda: self.said.append("idle")
        return stream

    def _event(self, enable_timing: bool = False) -> Any:
        assert enable_timing
        event = SimpleNamespace(at=None, synchronize=lambda: self.said.append("done"))
        event.record = lambda stream: setattr(event, "at", self.milliseconds)
        event.elapsed_time = lambda other: other.at - event.at
        return event


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> _Events:
    return _Events(monkeypatch)


def test_calls_on_a_gpu_are_timed_by_its_clock(events: _Events) -> None:
    def run(x: int, y: int) -> int:
        events.said.append("run")
        events.milliseconds += 250
        return x + y

    seconds, result = Clock(torch.device("cuda:0")).timed(run, 2, 3)
    assert (seconds, result) == (0.25, 5)
    assert events.said == ["idle", "run", "done"]
    assert not Clock(devices.CPU).stands


def _ways(events: _Events) -> tuple[Alternatives, list[str]]:
    ran: list[str] = []

    def way(name: str, milliseconds: float) -> Callable[..., Any]:
        def call(arguments: Any) -> Any:
            ran.append(name)
            events.milliseconds += milliseconds
            return [name]

        return call

    return Alternatives({"one": way("one", 9), "two": way("two", 3)}), ran


def test_turns_are_taken_by_the_gpus_clock_and_not_while_capturing(events: _Events) -> None:
    alternatives, ran = _ways(events)
    turns = Turns(alternatives, Verdicts(), Clock(torch.device("cuda:0")))
    events.capturing = True
    for _ in range(20):
        turns(())
    assert set(ran) == {"one"}
    events.capturing = False
    for _ in range(20):
        turns(())
    assert ran[-5:] == ["two"] * 5


def test_eager_is_timed_by_the_gpus_clock_and_not_while_capturing(events: _Events) -> None:
    alternatives, ran = _ways(events)

    def eager() -> list[str]:
        ran.append("eager")
        events.milliseconds += 1
        return ["eager"]

    program = lambda: alternatives.call(())  # noqa: E731
    clock = Clock(torch.device("cuda:0"))
    contest = Contest(program, eager, 3, Verdicts(), alternatives, clock)
    events.capturing = True
    for _ in range(10):
        contest()
    assert set(ran) == {"one"}
    events.capturing = False
    for _ in range(10):
        contest()
    assert ran[-3:] == ["eager"] * 3
