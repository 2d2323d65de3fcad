"""Calls that are captured once and replayed, on a stand-in for CUDA's graphs.

It notes what PyTorch runs while a graph is captured, and runs it again on the same memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_cases import ampere, graph_of, specs_of
from torch.utils._python_dispatch import TorchDispatchMode

from fx2relax.first_call import Compared
from fx2relax.on_gpu import on_gpu
from fx2relax.options import Options
from fx2relax.runtime.cuda_graphs import SIZES, WARM, Replayed

__all__ = ["ampere"]
CPU = torch.device("cpu")
Tensor = torch.Tensor


class _Noting(TorchDispatchMode):
    def __init__(self, steps: list[Any]) -> None:
        super().__init__()
        self.steps = steps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.steps.append((func, args, kwargs or {}, out))
        return out


class _Cuda:
    """The parts of `torch.cuda` that captures need."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.capturing, self.now, self.replays = False, 1, 0
        self.waits: list[int] = []
        self.captured: list[Any] = []
        for name, value in {
            "device": lambda device: contextlib.nullcontext(),
            "stream": lambda stream: contextlib.nullcontext(),
            "current_stream": self._stream,
            "Stream": lambda device: self._stream(device),
            "Event": lambda: SimpleNamespace(record=lambda stream: None),
            "CUDAGraph": self._graph,
            "graph": self._captured,
            "is_current_stream_capturing": lambda: self.capturing,
        }.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(Tensor, "record_stream", lambda tensor, stream: None)

    def _stream(self, device: Any = None) -> Any:
        wait = lambda event: self.waits.append(self.now)  # noqa: E731
        stream = SimpleNamespace(cuda_stream=self.now, wait_event=wait, device=device)
        stream.wait_stream = lambda other: None
        return stream

    def _graph(self) -> Any:
        steps: list[Any] = []

        def replay() -> None:
            self.replays += 1
            for func, args, kwargs, out in steps:
                again = func(*args, **kwargs)
                if isinstance(out, Tensor):
                    out.copy_(again)

        return SimpleNamespace(steps=steps, replay=replay)

    @contextlib.contextmanager
    def _captured(self, graph: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert not self.capturing, "two captures at once"
        self.capturing = True
        self.captured.append(stream.device)
        try:
            with _Noting(graph.steps):
                yield
        finally:
            self.capturing = False


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> _Cuda:
    return _Cuda(monkeypatch)


class _Program:
    """A function of a tuple of arguments that counts its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, arguments: Any) -> Any:
        self.calls += 1
        return list(self.function(*arguments))


def _replayed(function: Callable[..., Any], weights: Any = (), frozen: Any = ()) -> Any:
    program = _Program(function)
    return Replayed(program, CPU, weights, frozen), program


def _settle(call: Any, *arguments: Any) -> list[Any]:
    return [call(arguments) for _ in range(WARM + 1)]


def test_a_call_is_captured_after_a_few_and_replayed(cuda: _Cuda) -> None:
    call, program = _replayed(lambda x, n: ((x * n).sin(), x.mT + n))
    x = torch.rand(3, 4)
    results = _settle(call, x, 2)
    later = [torch.rand(3, 4) for _ in range(3)]
    results += [call((y, 2)) for y in later]
    assert program.calls == WARM + 1
    assert cuda.replays == 4
    # Each is the caller's to keep: all are looked at once all calls are made.
    for y, (sine, sums) in zip([x] * (WARM + 1) + later, results, strict=True):
        torch.testing.assert_close(sine, (y * 2).sin())
        torch.testing.assert_close(sums, y.mT + 2)
        assert sums.stride() == (y.mT + 2).stride()


def test_weights_are_read_where_they_lie(cuda: _Cuda) -> None:
    call, program = _replayed(lambda x, w: (x @ w,), weights=[1])
    x, w = torch.rand(2, 3), torch.rand(3, 3)
    _settle(call, x, w)
    w.mul_(3)
    torch.testing.assert_close(call((x, w))[0], x @ w)
    assert program.calls == WARM + 1
    other = w.clone()
    torch.testing.assert_close(call((x, other))[0], x @ other)
    assert program.calls == WARM + 2, "another tensor is another capture"


def test_frozen_weights_that_are_written_to_are_captured_anew(cuda: _Cuda) -> None:
    made: dict[int, Tensor] = {}

    def packed(x: Tensor, w: Tensor) -> Any:
        if w._version not in made:
            made[w._version] = w.mT.contiguous()
        return (x @ made[w._version],)

    call, program = _replayed(packed, weights=[1], frozen=[1])
    x, w = torch.rand(2, 3), torch.rand(3, 3)
    _settle(call, x, w)
    w.mul_(3)
    for _ in range(WARM + 2):
        torch.testing.assert_close(call((x, w))[0], x @ w.mT)
    assert program.calls == 2 * (WARM + 1)


def test_each_size_has_a_capture_up_to_a_limit(cuda: _Cuda) -> None:
    call, program = _replayed(lambda x: (x.exp(),))
    for _ in range(WARM + 2):
        for size in range(1, SIZES + 3):
            x = torch.rand(size)
            torch.testing.assert_close(call((x,))[0], x.exp())
    assert program.calls == SIZES * (WARM + 1) + 2 * (WARM + 2)


def test_an_argument_that_is_returned_is_the_callers(cuda: _Cuda) -> None:
    call, program = _replayed(lambda x: (x, x + 1, 7, None))
    _settle(call, torch.rand(2))
    y = torch.rand(2)
    same, more, seven, none = call((y,))
    assert same is y
    assert torch.equal(more, y + 1)
    assert (seven, none) == (7, None)
    assert program.calls == WARM + 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x[1:],),
        lambda x: (lambda y: (y, y[1:]))(x + 1),
        lambda x: ((x + 1)[:1].expand(5, 4),),
    ],
    ids=["an argument's memory", "another result's", "elements in one place"],
)
def test_results_that_share_memory_are_not_captured(function: Any, cuda: _Cuda) -> None:
    call, program = _replayed(function)
    for x in torch.rand(8, 3, 4):
        torch.testing.assert_close(call((x,)), list(function(x)))
    assert cuda.replays == 0
    assert program.calls == 8 + 1


def test_what_cannot_be_captured_runs_as_it_is(cuda: _Cuda) -> None:
    def read(x: Tensor) -> Any:
        if cuda.capturing:
            raise RuntimeError("no captured graph can read a size")
        return (x[: int(x.sum())],)

    call, program = _replayed(read)
    for _ in range(8):
        assert call((torch.ones(4),))[0].shape == (4,)
    assert (program.calls, cuda.replays) == (9, 0)


def test_tensors_elsewhere_and_objects_run_as_they_are(cuda: _Cuda) -> None:
    program = _Program(lambda x, o: (x + 1,))
    call = Replayed(program, torch.device("cuda:0"), (), ())
    for _ in range(8):
        call((torch.ones(2), None))
    assert (program.calls, cuda.replays) == (8, 0)
    call, program = _replayed(lambda x, o: (x + 1,))
    for _ in range(8):
        call((torch.ones(2), object()))
    assert (program.calls, cuda.replays) == (8, 0)


def test_a_capture_of_the_users_holds_the_kernels(cuda: _Cuda) -> None:
    call, program = _replayed(lambda x: (x + 1,))
    _settle(call, torch.ones(2))
    cuda.capturing = True
    assert call((torch.zeros(2),))[0].tolist() == [1.0, 1.0]
    assert (program.calls, cuda.replays) == (WARM + 2, 1)


def test_a_capture_is_on_a_stream_of_its_own_gpu(cuda: _Cuda) -> None:
    """PyTorch's own stream for captures is on the GPU that had the first."""
    for device in (CPU, torch.device("meta")):
        call = Replayed(_Program(lambda x: (x + 1,)), device, (), ())
        _settle(call, torch.ones(2, device=device))
    assert cuda.captured == [CPU, torch.device("meta")]


def test_threads_capture_one_after_the_other(cuda: _Cuda) -> None:
    def slow(x: Tensor) -> Any:
        time.sleep(0.05 * cuda.capturing)
        return (x + 1,)

    calls = [_replayed(slow)[0] for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(WARM):
            list(pool.map(lambda call: call((torch.ones(2),)), calls))
        list(pool.map(lambda call: call._capture((torch.ones(2),)), calls))
    assert len(cuda.captured) == 4


def test_inference_mode_and_not(cuda: _Cuda) -> None:
    call, _ = _replayed(lambda x: (x * 2,))
    for inference in (True, False, True, False):
        with torch.inference_mode(inference):
            x = torch.rand(3)
            for result in _settle(call, x):
                assert torch.equal(result[0], x * 2)
            assert call((x,))[0].is_inference() == inference
    x = torch.rand(3, requires_grad=True)
    assert not call((x,))[0].requires_grad


def test_another_stream_waits_for_the_last_replay(cuda: _Cuda) -> None:
    call, _ = _replayed(lambda x: (x + 1,))
    _settle(call, torch.ones(2))
    call((torch.ones(2),))
    assert cuda.waits == []
    cuda.now = 5
    call((torch.ones(2),))
    call((torch.ones(2),))
    assert cuda.waits == [5]


@pytest.mark.usefixtures("ampere")
def test_which_programs_are_replayed() -> None:
    options, device = Options.make(mode="reduce-overhead"), torch.device("cuda:0")

    def around(function: Any, *shapes: Any, replay: bool = True) -> Any:
        graph = graph_of(function, *shapes)
        specs = specs_of(graph)
        for spec, kind in zip(specs, ("user", "parameter", "buffer"), strict=False):
            spec.kind = kind
        specs[-1].mutated = True
        return on_gpu(list, graph, specs, device, options, replay=replay)

    made = around(lambda x, w, b: x @ w + b, (2, 3), (3, 3), (3,))
    assert isinstance(made, Replayed)
    assert isinstance(made._call, Compared)
    assert (made._weights, made._frozen) == ({1, 2}, [1])
    assert isinstance(around(torch.exp, (2,), replay=False), Compared)
    assert isinstance(around(lambda x: x + torch.rand_like(x), (2,)), Compared)
