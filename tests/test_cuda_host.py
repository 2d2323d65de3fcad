"""What surrounds kernels for a GPU, as far as it shows without one."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import weakref
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

from fx2relax import backend, devices, pipeline, programs, switches
from fx2relax.alternatives import Alternatives
from fx2relax.clocks import Clock
from fx2relax.errors import ArgumentError, BuildFailure
from fx2relax.graph_key import graph_key
from fx2relax.never_slower import Contest, Verdicts
from fx2relax.options import Options
from fx2relax.pipeline import building
from fx2relax.pipeline.in_torch import in_torch
from fx2relax.runtime import boundary
from fx2relax.runtime import in_torch as functions
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
    draft = programs.draft_of(graph, specs_of(graph), Options(library=library), False)
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
    found = _calls(lambda x: x.digamma() + torch.special.ndtri(x), square)
    assert found == ["digamma", "special_ndtri"]
    heads = (1, 2, 4, 8)
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    found = _calls(lambda q, k, v: attend(q, k, v, None, False)[0] + 1, heads, heads, heads)
    assert found == ["_scaled_dot_product_efficient_attention"]


@pytest.mark.usefixtures("ampere")
def test_what_is_generated_for_a_gpu() -> None:
    assert not _calls(lambda x: layer_norm(x.softmax(-1), (4,)).sum() / x.std(), (4, 4))
    assert not _calls(
        lambda x: torch.cat([x.T, x.narrow(0, 0, 2).sigmoid()]).flip(0) ** 2.0, (4, 4)
    )
    assert not _calls(lambda x: x.to(torch.float16) * 2 + torch.arange(4, device=x.device), (4,))
    assert not _calls(torch.mm, (4, 4), (4, 4), library="none")


@pytest.mark.usefixtures("ampere")
def test_a_program_for_a_gpu_takes_pytorchs_memory() -> None:
    graph = graph_of(lambda x, w: (x @ w).relu().softmax(-1) @ w, (4, 4), (4, 4))
    draft = programs.draft_of(graph, specs_of(graph), Options(), False)
    target = devices.facts(draft.device)
    lowered = pipeline.lower(draft.imported.mod, target=target)
    ready, _ = pipeline.give(lowered, draft.imported.name, draft.imported.num_input)
    text = building._to_virtual_machine()(in_torch(ready)).script()
    assert functions.EMPTY in text
    assert "alloc_storage" not in text
    assert "alloc_tensor" not in text


@pytest.mark.usefixtures("ampere")
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs CUDA's compiler")
def test_a_graph_is_compiled_for_a_gpu() -> None:
    graph = graph_of(lambda x, w: (x @ w).relu().softmax(-1), (4, 4), (4, 4))
    draft = programs.draft_of(graph, specs_of(graph), Options(), False)
    built = draft.compile("torch", None, "")
    assert built.census["tir_kernels"] >= 1
    assert [c.op_name for c in built.imported.torch_calls.values()] == ["aten.mm.default"]
    target = devices.facts(draft.device)
    lowered = pipeline.lower(draft.imported.mod, target=target)
    ready, _ = pipeline.give(lowered, draft.imported.name, draft.imported.num_input)
    assert b"fx2relax.gpu.empty" in (pipeline.library_code(ready, target=target) or b"")


# -- memory and numbers in PyTorch -------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let programs for the processor do as those for a GPU; what they allocate."""
    made: list[Any] = []
    give = building.give_results

    def given(mod: Any, *rest: Any) -> Any:
        mod, calling = give(mod, *rest)
        return in_torch(mod, "cpu"), calling

    def empty(*arguments: Any) -> torch.Tensor:
        fresh = functions._empty(*arguments)
        made.append(weakref.ref(fresh.untyped_storage()))
        return fresh

    monkeypatch.setattr(building, "give_results", given)
    tvm_ffi.register_global_func(functions.EMPTY, empty, override=True)
    yield made
    tvm_ffi.register_global_func(functions.EMPTY, functions._empty, override=True)


@pytest.mark.usefixtures("fresh")
def test_memory_of_pytorchs_goes_back_after_its_last_use(on_cpu: list[Any]) -> None:
    alive: list[int] = []

    @torch.library.custom_op("fx2relax_tests::look", mutates_args=())
    def look(x: torch.Tensor) -> torch.Tensor:
        alive.append(sum(m() is not None for m in on_cpu))
        return x.clone()

    look.register_fake(torch.empty_like)

    def net(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = look((x @ x).softmax(-1).cumsum(0))
        return x

    x = torch.rand(8, 8)
    compiled = torch.compile(net, backend="relax", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), net(x))
    assert len(on_cpu) >= 20, "too few intermediate results for a look at their memory"
    assert max(alive[:6]) <= 2


@pytest.mark.usefixtures("fresh", "on_cpu")
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_sizes_and_conditions_are_read_in_pytorch(sign: float) -> None:
    def net(x: torch.Tensor) -> Any:
        found = x.nonzero()
        chosen = torch.cond(x.sum() > 0, lambda x: x.sin() @ x, lambda x: x.cos() @ x, (x,))
        return found * 2, chosen, x[:0].exp() @ x

    x = sign * torch.tensor([[1.0, 0.0], [2.0, 0.5]])
    options = {"on_unsupported": "raise"}
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(net, backend="relax", fullgraph=True, options=options)
        torch.testing.assert_close(compiled(x), net(x))


def test_a_capture_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    there = SimpleNamespace(is_cuda=True)
    monkeypatch.setattr(functions, "from_dlpack", lambda _: there)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="no captured graph can read"):
        functions._sizes(SimpleNamespace(__dlpack__=lambda: None))


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
