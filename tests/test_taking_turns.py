"""A graph's programs take turns, no call is made twice, and the faster one stays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import fx2relax
from fx2relax import rivals
from fx2relax.alternatives import Alternatives
from fx2relax.background import Job
from fx2relax.never_slower import Verdicts
from fx2relax.taking_turns import Turns


class Ways:
    """Programs that take given times, and a note of who was called."""

    def __init__(self, **seconds: float) -> None:
        self.calls: list[str] = []
        self.seconds = seconds
        self.alternatives = Alternatives({name: self.way(name) for name in seconds})

    def way(self, name: str) -> Callable[[Sequence[Any]], str]:
        def run(arguments: Sequence[Any]) -> str:
            self.calls.append(name)
            time.sleep(self.seconds[name])
            return name

        return run


@pytest.mark.parametrize(("own", "rival", "fastest"), [(0.0, 0.02, "torch"), (0.02, 0.0, "other")])
def test_the_faster_one_stays(own: float, rival: float, fastest: str) -> None:
    ways = Ways(torch=own, other=rival)
    verdicts = Verdicts()
    turns = Turns(ways.alternatives, verdicts)
    results = [turns((1.0,)) for _ in range(20)]
    assert results == ways.calls, "a call was made twice, or another result returned"
    assert set(results[:4]) == {"torch", "other"}
    assert set(results[-4:]) == {fastest}
    assert ways.alternatives.names == [fastest]
    assert verdicts.known == {"()": fastest}


def test_each_size_has_its_own() -> None:
    ways = Ways(torch=0.0, other=0.0)
    run = {name: ways.way(name) for name in ways.seconds}

    def slow_for(name: str, size: int) -> Callable[[Sequence[Any]], str]:
        def call(arguments: Sequence[Any]) -> str:
            time.sleep(0.02 if arguments[0] == size else 0.0)
            return run[name](arguments)

        return call

    turns = Turns(
        Alternatives({"torch": slow_for("torch", 5), "other": slow_for("other", 7)}), Verdicts()
    )
    for _ in range(20):
        turns((5,))
        turns((7,))
    assert (turns((5,)), turns((7,))) == ("other", "torch")


def test_a_verdict_is_remembered() -> None:
    ways = Ways(torch=0.0, other=0.02)
    verdicts = Verdicts()
    verdicts.known["()"] = "other"
    turns = Turns(ways.alternatives, verdicts)
    assert [turns(()) for _ in range(3)] == ["other"] * 3


def test_the_first_one_runs_until_the_other_is_there() -> None:
    ways = Ways(torch=0.0)
    job = Job(lambda: lambda arguments: "other", "x")
    turns = Turns(Alternatives({"torch": ways.way("torch")}, ("other", job)), Verdicts())
    assert turns(()) == "torch"
    assert not job.done
    assert turns(()) == "torch"
    assert fx2relax.wait_for_compilation(60)
    assert "other" in [turns(()) for _ in range(2)]


def test_errors_are_the_programs_own() -> None:
    def fail(arguments: Sequence[Any]) -> None:
        raise ValueError("wrong shape")

    turns = Turns(Alternatives({"torch": fail, "other": fail}), Verdicts())
    for _ in range(3):
        with pytest.raises(ValueError, match="wrong shape"):
            turns(())


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FX2RELAX_NEVER_SLOWER", "1")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.BatchNorm1d(48)
        self.first, self.last = torch.nn.Linear(48, 64), torch.nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(self.first(self.norm(x)))
        return self.last(torch.nn.functional.dropout(hidden, 0.25, self.training))


def _train(run: Callable[[torch.Tensor], torch.Tensor], net: Net, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    data = torch.randn(steps, 16, 48, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    losses = []
    for x in data:
        optimizer.zero_grad()
        loss = run(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[rivals.Entered]:
    """What is compiled in several ways."""
    found: list[rivals.Entered] = []
    enter = rivals.enter

    def spy(*arguments: Any) -> rivals.Entered:
        found.append(enter(*arguments))
        return found[-1]

    monkeypatch.setattr(rivals, "enter", spy)
    return found


class Cached(torch.nn.Module):
    """One step of decoding: it writes to the cache that it reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = torch.nn.Linear(48, 64), torch.nn.Linear(64, 48)

    def forward(self, x: torch.Tensor, cache: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, at, self.into(x))
        return self.out(cache.softmax(0).sum(0, keepdim=True)) + x


def _decode(run: Callable[..., torch.Tensor], steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, cache = torch.ones(1, 48), torch.zeros(steps, 64)
    with torch.no_grad():
        for step in range(steps):
            x = run(x, cache, torch.tensor([step]))
    return x, cache


@pytest.mark.usefixtures("timed")
def test_a_cache_is_written_once_whoever_has_the_turn(entered: list[rivals.Entered]) -> None:
    net = Cached()
    fast = torch.compile(net, backend="relax")
    _decode(fast, 24)
    assert fx2relax.wait_for_compilation(300)
    got = _decode(fast, 24)
    assert [len(e.alternatives.names) for e in entered] == [1] * len(entered), "there is no verdict"
    assert entered
    torch.testing.assert_close(got, _decode(net, 24), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("timed")
def test_training_is_eagers_whoever_has_the_turn(entered: list[rivals.Entered]) -> None:
    eager, fast = Net(), Net()
    expected = _train(eager, eager, 20)
    got = _train(torch.compile(fast, backend="relax"), fast, 20)
    assert [e.alternatives.names for e in entered] != []
    assert all(len(e.alternatives.names) == 1 for e in entered), "there is no verdict"
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    for name, buffer in eager.state_dict().items():
        torch.testing.assert_close(fast.state_dict()[name], buffer, rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("timed")
def test_not_with_deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "enter", lambda *a: pytest.fail("programs were to be timed"))
    torch.use_deterministic_algorithms(True)
    try:
        net = Net()
        _train(torch.compile(net, backend="relax"), net, 2)
    finally:
        torch.use_deterministic_algorithms(False)
