"""Programs that make much of the weights: while they are timed, one at a time holds it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import fx2relax
from fx2relax import backend
from fx2relax.alternatives import Alternatives, Heavy
from fx2relax.never_slower import Contest, Verdicts
from fx2relax.runtime.program import Program
from fx2relax.taking_turns import Turns


class Held:
    """Heavy programs that take given times, and what each holds."""

    def __init__(self, **seconds: float) -> None:
        self.holding: set[str] = set()
        self.most = self.made = 0
        self.calls: list[str] = []
        self.alternatives = Alternatives({n: self._heavy(n, s) for n, s in seconds.items()})

    def _heavy(self, name: str, seconds: float) -> Heavy:
        def run(arguments: Sequence[Any]) -> str:
            self.calls.append(name)
            if name not in self.holding:
                self.made += 1
                time.sleep(0.05)  # which is not to count
            self.holding.add(name)
            self.most = max(self.most, len(self.holding))
            time.sleep(seconds)
            return name

        return Heavy(run, lambda: self.holding.discard(name))


@pytest.mark.parametrize("sizes", [(), (3,)])
@pytest.mark.parametrize("fastest", ["torch", "generated", "eager"])
def test_one_at_a_time_is_timed(fastest: str, sizes: tuple[int, ...]) -> None:
    seconds = {way: 0.002 if way == fastest else 0.006 for way in ("torch", "generated")}
    held = Held(**seconds)

    def eager(*arguments: Any) -> str:
        time.sleep(0.002 if fastest == "eager" else 0.006)
        return "eager"

    contest = Contest(lambda *a: held.alternatives.call(a), eager, 1, Verdicts(), held.alternatives)
    results = [contest(*sizes) for _ in range(8)]
    assert set(results[:3]) == {"torch"}, "no other result before the verdict"
    assert contest(*sizes) == fastest
    assert held.most == 1
    assert held.made <= 2 + (fastest != "generated"), "weights were made anew between rounds"
    if fastest != "eager":
        assert held.alternatives.names == [fastest], "sizes would change which one holds"
        made = held.made
        assert [contest(*sizes), contest(*sizes)] == [fastest] * 2
        assert held.made == made


@pytest.mark.parametrize(("own", "rival", "fastest"), [(0.0, 0.02, "torch"), (0.02, 0.0, "other")])
def test_one_at_a_time_has_its_turns(own: float, rival: float, fastest: str) -> None:
    held = Held(torch=own, other=rival)
    verdicts = Verdicts()
    turns = Turns(held.alternatives, verdicts)
    results = [turns((1.0,)) for _ in range(30)]
    assert results == held.calls, "a call was made twice, or another result returned"
    assert set(results) == {"torch", "other"}
    assert set(results[-4:]) == {fastest}
    assert held.most == 1
    assert held.made <= 4, "turns change too often"
    assert verdicts.known == {"()": fastest}


class OnTrial(Held):
    """The same, that can be timed before they hold anything."""

    trials = 0

    def _heavy(self, name: str, seconds: float) -> Heavy:
        on_trial = False

        @contextlib.contextmanager
        def trial() -> Iterator[None]:
            nonlocal on_trial
            on_trial = True
            self.trials += 1
            yield
            on_trial = False

        heavy = super()._heavy(name, seconds)

        def run(arguments: Sequence[Any]) -> str:
            if not on_trial:
                return str(heavy(arguments))
            time.sleep(seconds)
            return "of no meaning"

        return Heavy(run, heavy.let_go, trial)


@pytest.mark.parametrize("fastest", ["torch", "generated"])
def test_what_loses_on_trial_is_never_made(fastest: str) -> None:
    seconds = {way: 0.002 if way == fastest else 0.006 for way in ("torch", "generated")}
    held = OnTrial(**seconds)

    def eager() -> str:
        time.sleep(0.008)
        return "eager"

    contest = Contest(lambda: held.alternatives.call(()), eager, 1, Verdicts(), held.alternatives)
    results = [contest() for _ in range(8)]
    assert results[:3] == ["torch"] * 3
    assert results[-1] == fastest
    assert held.trials == 1
    assert ("generated" in held.calls) == (fastest == "generated")


def test_other_threads_do_not_see_a_trial() -> None:
    held = OnTrial(torch=0.0, generated=0.0)
    found: list[str] = []
    with held.alternatives.trial("generated"):
        other = threading.Thread(target=lambda: found.append(held.alternatives.call(())))
        other.start()
        other.join()
        found.append(held.alternatives.call(()))
    found.append(held.alternatives.call(()))
    assert found == ["torch", "of no meaning", "torch"]


@pytest.mark.usefixtures("fresh")
def test_a_network_holds_its_weights_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "HEAVY", 1)
    monkeypatch.setenv("FX2RELAX_NEVER_SLOWER", "1")
    monkeypatch.setenv("FX2RELAX_BACKGROUND", "0")
    programs: list[Program] = []
    made = Program.__init__

    def noted(self: Program, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        programs.append(self)

    monkeypatch.setattr(Program, "__init__", noted)
    first, second = torch.nn.Conv2d(16, 64, 3), torch.nn.Conv2d(64, 64, 3)
    net = torch.nn.Sequential(first, torch.nn.BatchNorm2d(64), torch.nn.ReLU(), second).eval()
    fast, x = torch.compile(net, backend="relax"), torch.randn(2, 16, 20, 20)
    with torch.no_grad():
        for _ in range(10):
            torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-5)
            assert sum(bool(p._parts._weights._sets) for p in programs) <= 1
        first.weight.mul_(2)
        torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-5)
    assert [p.made_of > 0 for p in programs] == [True, True], "nothing was to be held twice"


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("look_on", [fx2relax.check, fx2relax.explain])
def test_who_looks_on_sees_no_trial(
    look_on: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "HEAVY", 1)
    monkeypatch.setenv("FX2RELAX_NEVER_SLOWER", "1")
    trials: list[Program] = []
    monkeypatch.setattr(Program, "standing_in", trials.append)
    net = torch.nn.Sequential(torch.nn.Conv2d(16, 64, 3), torch.nn.BatchNorm2d(64)).eval()
    with torch.no_grad():
        found = look_on(net, torch.randn(2, 16, 20, 20))
    assert not trials
    if look_on is fx2relax.check:
        assert found.right
        assert found.programs == 2
