"""A graph's second program is compiled beside the first, and neither forks nor exits mind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fx2relax
from fx2relax import background, never_slower
from fx2relax.alternatives import Alternatives
from fx2relax.background import Job


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FX2RELAX_NEVER_SLOWER", "1")
    monkeypatch.setenv("FX2RELAX_BACKGROUND", "1")
    fx2relax.reset_stats()
    torch._dynamo.reset()
    yield
    fx2relax.wait_for_compilation()
    torch._dynamo.reset()


def _net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 32)
    ).eval()


def test_the_second_program_is_there_once_it_was_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered: list[Alternatives] = []
    contest = never_slower.Contest
    monkeypatch.setattr(never_slower, "Contest", lambda *a: entered.append(a[4]) or contest(*a))
    net, x = _net(), torch.randn(4, 64)
    fast = torch.compile(net, backend="relax")
    with torch.no_grad():
        expected = net(x)
        torch.testing.assert_close(fast(x), expected)
        (one,) = entered
        assert one.names == ["torch"]
        assert fx2relax.wait_for_compilation()  # one call alone is not worth a second program
        assert one.names == ["torch"]
        torch.testing.assert_close(fast(x), expected)
        assert fx2relax.wait_for_compilation(120)
        torch.testing.assert_close(fast(x), expected)
        assert one.names == ["torch", "generated"]
        for _ in range(8):
            torch.testing.assert_close(fast(x), expected)
    assert len(one.names) == 1


def test_calls_go_on_while_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()

    def work() -> object:
        begun.set()
        go.wait(60)
        return lambda arguments: "second"

    ways = Alternatives({"torch": lambda arguments: "first"}, ("generated", Job(work, "x")))
    assert not ways.complete()
    assert not begun.wait(0.05)
    assert not ways.complete()
    assert begun.wait(60)
    assert ways.call(()) == "first"
    assert not fx2relax.wait_for_compilation(0.01)
    go.set()
    assert fx2relax.wait_for_compilation(60)
    assert ways.complete()
    ways.keep("generated")
    assert ways.call(()) == "second"
    assert ways.names == ["generated"]


@pytest.mark.parametrize("outcome", ["fails", "is nothing"])
def test_what_cannot_be_made_is_left_out(outcome: str) -> None:
    def work() -> None:
        if outcome == "fails":
            raise ValueError("no such kernel")

    ways = Alternatives({"torch": lambda arguments: 1}, ("generated", Job(work, "x")))
    ways.complete()
    ways.complete()
    assert fx2relax.wait_for_compilation(60)
    assert ways.complete()
    assert ways.names == ["torch"]


def test_jobs_run_in_turn_in_one_thread() -> None:
    threads, order = set(), []

    def work(number: int) -> None:
        threads.add(threading.current_thread())
        order.append(number)
        time.sleep(0.01)

    for number in range(5):
        Job(lambda number=number: work(number), "x").start()  # type: ignore[misc]
    assert fx2relax.wait_for_compilation(60)
    assert order == list(range(5))
    assert len(threads) == 1
    assert threading.current_thread() not in threads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_waits_for_the_work_at_hand() -> None:
    steps: list[str] = []
    begun = threading.Event()

    def work() -> None:
        begun.set()
        time.sleep(0.3)
        steps.append("worked")

    first, second = Job(work, "x"), Job(lambda: steps.append("second"), "x")
    first.start()
    second.start()
    assert begun.wait(60)
    child = os.fork()
    if child == 0:
        # No assertion may leave the child: it is a copy of the test runner.
        good = steps[:1] == ["worked"] and second.done and fx2relax.wait_for_compilation(1)
        third = Job(lambda: 3, "x")
        third.start()
        good = good and fx2relax.wait_for_compilation(30) and third.result == 3
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert fx2relax.wait_for_compilation(60)
    assert steps == ["worked", "second"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_does_not_wait_for_another_process() -> None:
    waits, go, order = threading.Event(), threading.Event(), []

    def work() -> int:
        with background.elsewhere():
            waits.set()
            go.wait(60)
            order.append("answered")
        return 3

    job = Job(work, "x")
    job.start()
    assert waits.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(0 if job.done and job.result is None else 1)
    order.append("forked")
    assert os.waitpid(child, 0)[1] == 0
    go.set()
    assert fx2relax.wait_for_compilation(60)
    assert order == ["forked", "answered"]
    assert job.result == 3
    assert not background._worker.working.locked()


_SCRIPT = """
    import torch, fx2relax
    from fx2relax import background

    net = torch.nn.Sequential(
        *[m for _ in range(6) for m in (torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.SiLU())]
    ).eval()
    x = torch.randn(1, 8, 32, 32)
    fast = torch.compile(net, backend="relax", options={"cache": False})
    with torch.no_grad():
        for _ in range(3):
            fast(x)
    assert not fx2relax.wait_for_compilation(0), "there is nothing to interrupt"
    print("ends")
"""


def test_a_process_ends_while_it_compiles(tmp_path: Path) -> None:
    environment = dict(os.environ, FX2RELAX_CACHE_DIR=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(_SCRIPT)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")


def test_what_stops_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    def work() -> None:
        raise background.Stopped

    job = Job(work, "x")
    with caplog.at_level("INFO", logger="fx2relax"):
        job.run()
    assert job.done
    assert job.result is None
    assert not caplog.records


def test_nothing_is_in_the_background_when_it_is_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FX2RELAX_BACKGROUND", "0")
    monkeypatch.setattr(background.Job, "start", lambda self: pytest.fail("it was started"))
    net, x = _net(), torch.randn(4, 64)
    fast = torch.compile(net, backend="relax")
    with torch.no_grad():
        for _ in range(8):
            torch.testing.assert_close(fast(x), net(x))
    assert fx2relax.stats()["graphs"] == 1
