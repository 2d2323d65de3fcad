"""A graph that is slower than eager runs in eager, and one that is not does not."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.fx._lazy_graph_module import _LazyGraphModule

import fx2relax
from fx2relax import never_slower
from fx2relax.alternatives import Alternatives
from fx2relax.converters.common import te, te_call, tirx
from fx2relax.never_slower import Contest, Verdicts, verdict

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FX2RELAX_NEVER_SLOWER", "1")
    fx2relax.reset_stats()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _slow_sin(x: Any) -> Any:
    """sin(x), beside a sum that takes so long that no pause of eager's looks alike."""

    def kernel(x: Any) -> Any:
        step = te.reduce_axis((0, 40_000))
        shifted = lambda *i: tirx.cos(x(*i) + tirx.Cast("float32", step))  # noqa: E731
        total = te.compute(x.shape, lambda *i: te.sum(shifted(*i), axis=step))
        tiny = tirx.const(1e-30, "float32")
        return te.compute(x.shape, lambda *i: tirx.sin(x(*i)) + total(*i) * tiny)

    return te_call(kernel, x)


SLOW = {"call_function_map": {aten.sin.default: _slow_sin}}


def _wave(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def _calls(fn: Callable[..., Any], x: torch.Tensor, count: int = 8) -> None:
    for _ in range(count):
        torch.testing.assert_close(fn(x), x.sin() + 1)


def test_a_slow_graph_runs_in_eager(caplog: pytest.LogCaptureFixture) -> None:
    fast = torch.compile(_wave, backend="relax", options=SLOW, fullgraph=True)
    with caplog.at_level(logging.INFO, logger="fx2relax"):
        _calls(fast, torch.randn(300))
    stats = fx2relax.stats()
    assert stats["graphs_slower"] == 1
    assert stats["graphs"] == 1
    assert stats["calls"] == 8
    assert "runs in eager, which is faster" in caplog.text


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**SLOW, "never_slower": False}
    _calls(torch.compile(_wave, backend="relax", options=options), torch.randn(300))
    torch._dynamo.reset()
    monkeypatch.setenv("FX2RELAX_NEVER_SLOWER", "0")
    _calls(torch.compile(_wave, backend="relax", options=SLOW), torch.randn(300))
    assert fx2relax.stats()["graphs_slower"] == 0


def test_each_size_has_a_verdict_of_its_own() -> None:
    fast = torch.compile(_wave, backend="relax", options=SLOW, dynamic=True)
    _calls(fast, torch.randn(300))
    _calls(fast, torch.randn(400))
    assert fx2relax.stats()["graphs"] == 1
    assert fx2relax.stats()["graphs_slower"] == 1


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.sin() + torch.rand(300),
        lambda x: x.sin_(),
    ],
    ids=["draw", "write"],
)
def test_what_leaves_a_trace_is_not_timed(fn: Callable[..., Any]) -> None:
    fast = torch.compile(fn, backend="relax", options=SLOW, fullgraph=True)
    for _ in range(8):
        x, y = (torch.linspace(0, 1, 300) for _ in range(2))
        torch.manual_seed(0)
        expected = fn(x)
        torch.manual_seed(0)
        torch.testing.assert_close(fast(y), expected)
        torch.testing.assert_close(x, y)
    assert fx2relax.stats()["graphs_slower"] == 0


def test_an_assertion_is_a_trace() -> None:
    plain = torch.fx.symbolic_trace(lambda x: aten.sin.default(x))
    asserting = torch.fx.symbolic_trace(lambda x: aten.sin.default(aten._assert_async.msg(x, "")))
    assert never_slower.leaves_no_trace(plain, False)
    assert not never_slower.leaves_no_trace(plain, True)
    assert not never_slower.leaves_no_trace(asserting, False)


def test_training_is_not_timed() -> None:
    fast = torch.compile(_wave, backend="relax", options=SLOW)
    x = torch.randn(300, requires_grad=True)
    for _ in range(8):
        (slope,) = torch.autograd.grad(fast(x).sum(), x)
        torch.testing.assert_close(slope, x.cos())
    assert fx2relax.stats()["graphs_slower"] == 0


def test_views_of_inputs_in_eager() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.view(3, 100), x.sin(), x

    fast = torch.compile(fn, backend="relax", options=SLOW)
    x = torch.randn(300)
    for _ in range(8):
        view, wave, same = fast(x)
        assert same is x
        assert view.data_ptr() == x.data_ptr()
        torch.testing.assert_close(wave, x.sin())
    assert fx2relax.stats()["graphs_slower"] == 1


def test_a_verdict_is_kept_beside_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FX2RELAX_CACHE", "1")
    monkeypatch.setenv("FX2RELAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(never_slower, "verdict", lambda times: True)
    x = torch.randn(300)
    _calls(torch.compile(_wave, backend="relax"), x)
    assert fx2relax.stats()["graphs_slower"] == 1
    torch._dynamo.reset()
    fx2relax.reset_stats()
    monkeypatch.setattr(never_slower, "verdict", lambda times: False)
    _calls(torch.compile(_wave, backend="relax"), x, 1)
    assert fx2relax.stats()["graphs_slower"] == 1
    assert fx2relax.stats()["cache_hits"] == 1


def test_other_modes_see_each_call_once() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[Any] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    runs: list[str] = []
    contest = Contest(
        lambda x: runs.append("program"), lambda x: runs.append("eager"), 1, Verdicts()
    )
    with Mode():
        for _ in range(4):
            contest(torch.ones(1))
    assert runs == ["program"] * 4


def test_what_eager_raises_is_the_programs_to_say() -> None:
    def broken(x: int) -> int:
        raise RuntimeError("not here")

    contest = Contest(lambda x: x, broken, 1, Verdicts())
    assert [contest(5) for _ in range(4)] == [5] * 4


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([(1, 2)], None),
        ([(1, 2)] * 2, False),
        ([(1, 1.9)] * 2, None),
        ([(2, 1)] * 2, None),
        ([(1, 2)] * 3, False),
        ([(1.04, 1)] * 4, None),
        ([(1.04, 1)] * 5, False),
        ([(1.2, 1)] * 4, None),
        ([(1.2, 1)] * 5, True),
        ([(1.2, 1)] * 4 + [(1.2, 1.3)], True),
        ([(1.2, 1)] * 4 + [(0.9, 1)], False),
        ([(9, 1)] * 3 + [(1, 1)] * 2, False),
    ],
)
def test_verdicts(times: list[tuple[float, float]], expected: bool | None) -> None:
    assert verdict([(own / 1e3, eager / 1e3) for own, eager in times]) is expected


def test_what_takes_long_is_timed_twice() -> None:
    assert verdict([(2.5, 3.0)]) is False
    assert verdict([(5.0, 3.0)]) is None
    assert verdict([(5.0, 3.0)] * 2) is True
    assert verdict([(5.0, 3.0), (2.9, 3.0)]) is False


def _contest(seconds: dict[str, float], roomy: bool = False) -> tuple[Contest, list[str]]:
    """A contest of ways that take so long, and which of them ran."""
    runs: list[str] = []

    def way(name: str) -> Callable[..., Any]:
        def run(*arguments: Any) -> str:
            runs.append(name)
            time.sleep(seconds[name])
            return name

        return run

    programs = {name: way(name) for name in seconds if name != never_slower.EAGER}
    alternatives = Alternatives(programs)
    contest = Contest(
        lambda *a: alternatives.call(a),
        way(never_slower.EAGER),
        1,
        Verdicts(),
        alternatives,
        roomy=roomy,
    )
    return contest, runs


@pytest.mark.parametrize("fastest", ["torch", "generated", "eager"])
@pytest.mark.parametrize("sizes", [(), (3,)])
def test_the_fastest_way_stays(fastest: str, sizes: tuple[int, ...]) -> None:
    ways = ["torch", "generated", "eager"]
    contest, runs = _contest({way: 0.002 if way == fastest else 0.006 for way in ways})
    results = [contest(*sizes) for _ in range(8)]
    assert set(results[:4]) == {"torch"}, "no other result before the verdict"
    runs.clear()
    assert contest(*sizes) == fastest
    assert runs == [fastest]


@pytest.mark.parametrize("hopeless", ["generated", "eager"])
def test_what_is_slower_by_far_has_few_turns(hopeless: str) -> None:
    ways = ["torch", "generated", "eager"]
    contest, runs = _contest({way: 0.02 if way == hopeless else 0.006 for way in ways})
    for _ in range(8):
        contest()
    prepared = hopeless != "eager"
    assert runs.count(hopeless) == 2 + prepared
    assert runs.count("torch") > 5, "the others went on"


def test_a_short_way_is_timed_as_in_a_loop() -> None:
    """The first call after another way's finds its caches cold, and is not what counts."""
    runs: list[str] = []

    def generated(_: Any) -> str:
        time.sleep(0.0002 if runs[-1:] == ["generated"] else 0.003)
        runs.append("generated")
        return "generated"

    def steady(*_: Any) -> str:
        time.sleep(0.001)
        runs.append("steady")
        return "steady"

    alternatives = Alternatives({"torch": steady, "generated": generated})
    contest = Contest(lambda *a: alternatives.call(a), steady, 1, Verdicts(), alternatives)
    for _ in range(8):
        contest()
    assert contest() == "generated"


@pytest.mark.parametrize(
    ("ways", "fastest"),
    [
        (ways, fastest)
        for ways in (["torch", "eager"], ["torch", "generated", "eager"])
        for fastest in ways
    ],
)
def test_eager_runs_alone_where_memory_counts(
    ways: list[str], fastest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {way: 0.002 if way == fastest else 0.006 for way in ways}
    contest, runs = _contest(seconds, roomy=True)
    monkeypatch.setattr(never_slower, "give_back", lambda: runs.append("freed"))
    results = [contest() for _ in range(never_slower.SETTLED + 1)]
    assert set(results[:3]) == {"torch"}, "no other result before the verdict"
    begin = runs.index("freed")
    assert "eager" not in runs[:begin]
    row = runs[begin + 1 : runs.index("freed", begin + 1)]
    assert len(row) >= 4
    assert set(row) == {"eager"}
    runs.clear()
    assert contest() == fastest
    assert runs == [fastest]


@pytest.mark.parametrize(
    ("size", "symbolic", "much"), [(8200, False, True), (8000, False, False), (20000, True, False)]
)
def test_what_takes_much_memory(size: int, symbolic: bool, much: bool) -> None:
    found: list[bool] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(never_slower.is_roomy(graph))
        return graph.forward

    x = torch.empty(size, device="meta")
    if symbolic:
        torch._dynamo.mark_dynamic(x, 0)
    torch.compile(lambda x: x[:, None] * x, backend=backend)(x)
    assert found == [much]


def test_sizes_have_fastest_ways_of_their_own() -> None:
    contest, _ = _contest({"torch": 0.006, "generated": 0.002, "eager": 0.006})
    for _ in range(8):
        contest(3)
    contest._verdicts.known["(4,)"] = "torch"
    assert [contest(size) for size in (3, 4, 3, 4)] == ["generated", "torch"] * 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_generated_products_are_tried(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[str] = []
    keep = Alternatives.keep
    monkeypatch.setattr(
        Alternatives, "keep", lambda self, name: kept.extend(self.names) or keep(self, name)
    )
    net = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 10))
    fast = torch.compile(net, backend="relax", dynamic=dynamic)
    x = torch.randn(32, 64)
    with torch.no_grad():
        for _ in range(10):
            torch.testing.assert_close(fast(x), net(x), rtol=1e-5, atol=1e-5)
        net[0].weight.mul_(2)
        torch.testing.assert_close(fast(x), net(x), rtol=1e-5, atol=1e-5)
    assert kept == ([] if dynamic else ["torch", "generated"])


def test_generated_products_are_not_tried_where_bits_matter() -> None:
    net, x = torch.nn.Linear(64, 64), torch.randn(40, 64)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.no_grad():
            fast = torch.compile(net, backend="relax", options={"library": "auto"})
            first = fast(x)
            assert all(torch.equal(first, fast(x)) for _ in range(9))
    finally:
        torch.use_deterministic_algorithms(False)


def test_eager_goes_through_no_wrapper_of_a_module_whose_code_was_not_made() -> None:
    callers: list[set[str]] = []

    def seen(x: torch.Tensor) -> torch.Tensor:
        frame: FrameType | None = sys._getframe(1)
        names: set[str] = set()
        while frame is not None and frame.f_code.co_name != "test_body":
            names.add(frame.f_code.co_name)
            frame = frame.f_back
        callers.append(names)
        return x + 1

    graph = torch.fx.Graph()
    graph.output(graph.call_function(seen, (graph.placeholder("x"),)))
    module = _LazyGraphModule(torch.nn.Module(), graph)
    verdicts = Verdicts()
    verdicts.known["()"] = never_slower.EAGER
    contest = Contest(torch.cos, module.forward, 1, verdicts)

    def test_body() -> None:
        for _ in range(3):
            assert torch.equal(contest(torch.zeros(2)), torch.ones(2))

    test_body()
    assert len(callers) == 3
    assert all("forward" in names for names in callers)
    assert not any("_lazy_forward" in names for names in callers)
