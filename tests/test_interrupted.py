"""Ctrl-C while a model is compiled: it comes out as what it is, and the next call compiles."""

from __future__ import annotations

import ast
import functools
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import fx2relax
from fx2relax import background, disk, registry, whole
from fx2relax.background import Job
from fx2relax.compat import tvm
from fx2relax.pipeline import llvm_turns

_OWN = (str(Path(fx2relax.__file__).parent), str(Path(__file__).parent.parent / "converters"))
_COUNT = 8


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for switch in ("CACHE", "BACKGROUND", "NEVER_SLOWER"):
        monkeypatch.setenv(f"FX2RELAX_{switch}", "1")
    monkeypatch.setenv("FX2RELAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(disk, "_told", set())
    torch._dynamo.reset()
    yield
    fx2relax.wait_for_compilation(300)
    torch._dynamo.reset()


def _function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).softmax(-1) + x.cumsum(1).sum() % 4


def _arguments() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 6), torch.randn(6, 5)


@functools.cache
def _cleaning(file: str) -> frozenset[int]:
    """The lines at which Python leaves a ``with`` block, and those of ``finally``.

    A signal does not come there before the block is left; an exception of a trace does.
    """
    found: set[int] = set()
    for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.With):
            found |= set(range(node.lineno, node.body[0].lineno))
        elif isinstance(node, ast.Try) and node.finalbody:
            found |= set(range(node.finalbody[0].lineno, (node.end_lineno or 0) + 1))
    return frozenset(found)


def _cleans_up(frame: FrameType | None) -> bool:
    """Whether a function is called by one that leaves a block."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OWN) and frame.f_lineno in _cleaning(file):
            return True
        frame = frame.f_back
    return False


# What runs when objects are dropped: Python says what is raised there, and goes on.
_FINALIZERS = ("_forget", "unregister", "gone", "drop")


def _compiled_at_line(at: int) -> int | None:
    """Compile, with Ctrl-C at a line of this package's: how many lines it took if it came late."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        file = frame.f_code.co_filename
        if not file.startswith(_OWN) or frame.f_code.co_name in _FINALIZERS:
            return None
        if event == "line" and frame.f_lineno not in _cleaning(file):
            lines += 1
            if at and lines >= at and not _cleans_up(frame):
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with torch.no_grad():
            torch.compile(_function, backend="relax")(*_arguments())
    except KeyboardInterrupt:
        return None
    finally:
        sys.settrace(before)
    return lines


def _all_is_well(tmp_path: Path) -> None:
    """A call compiles and is right, nothing runs in PyTorch, and what is beside goes on."""
    fx2relax.reset_stats()
    torch._dynamo.reset()
    with torch.no_grad():
        result = torch.compile(_function, backend="relax")(*_arguments())
    torch.testing.assert_close(result, _function(*_arguments()))
    stats = fx2relax.stats()
    assert stats["nodes_fallback"] == 0
    assert stats["nodes_total"] > 0
    assert stats["graphs"] == 1
    assert not whole._inside
    assert not whole.is_active()
    assert registry._scopes.get() == ()
    assert not llvm_turns._door.inside
    assert len(list(tmp_path.glob("**/*.tmp"))) <= 1  # a file that has no owner yet
    job = Job(lambda: 3, "x")
    job.start()
    assert fx2relax.wait_for_compilation(60)
    assert job.result == 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "place",
    [
        place if place in (2, 5) else pytest.param(place, marks=pytest.mark.whole)
        for place in range(_COUNT)
    ],
)
def test_an_interruption_at_a_line(
    place: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _all_is_well(tmp_path)  # what is done once for a process
    for path in tmp_path.glob("programs/*"):
        path.unlink()
    torch._dynamo.reset()
    lines = _compiled_at_line(0)
    assert lines is not None
    for path in tmp_path.glob("programs/*"):
        path.unlink()
    torch._dynamo.reset()
    at = random.Random(place).randrange(lines * place // _COUNT, lines * (place + 1) // _COUNT)
    assert _compiled_at_line(at + 1) is None, f"it was swallowed at line {at} of {lines}"
    _all_is_well(tmp_path)
    assert [record.message for record in caplog.records] == []


def test_an_interruption_inside_of_tvm() -> None:
    """Of a Python function that TVM calls."""
    # A process that was begun in the background is told to ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # Python sees a signal between two steps
            pass

    tvm.register_global_func("fx2relax.tests.interrupted", interrupted, override=True)
    try:
        with pytest.raises(KeyboardInterrupt):
            tvm.get_global_func("fx2relax.tests.interrupted")()
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_background_thread_outlives_what_is_thrown_into_it() -> None:
    def work() -> None:
        raise SystemExit

    first, second = Job(work, "x"), Job(lambda: 3, "x")
    first.start()
    second.start()
    assert fx2relax.wait_for_compilation(60)
    assert first.done
    assert second.result == 3
    third = Job(lambda: 4, "x")
    third.start()
    assert fx2relax.wait_for_compilation(60)
    assert third.result == 4


@pytest.mark.parametrize("begun", [False, True])
def test_an_interruption_while_the_background_thread_is_begun(
    begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        if begun:
            start(self)
        raise KeyboardInterrupt

    job = Job(lambda: 3, "x")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            job.start()
    assert fx2relax.wait_for_compilation(60)
    assert job.result == 3
    assert background._worker.thread is None


def test_where_there_are_no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    job = Job(lambda: 3, "x")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        job.start()
    assert job.done
    assert job.result is None
    assert fx2relax.wait_for_compilation(1)


_IMPORT = """
    import importlib, sys
    import torch
    from fx2relax import registry

    importlib.import_module("fx2relax.converters.common")
    load = importlib.import_module
    def interrupted(name):
        if name == "fx2relax.converters":
            load("fx2relax.converters.pooling")
            raise KeyboardInterrupt
        return load(name)
    importlib.import_module = interrupted
    try:
        registry.load()
    except KeyboardInterrupt:
        importlib.import_module = load
    f = lambda x: torch.nn.functional.max_pool2d(x, 2).relu()
    x = torch.randn(1, 2, 4, 4)
    torch.testing.assert_close(torch.compile(f, backend="relax")(x), f(x))
    import fx2relax
    print(fx2relax.stats()["nodes_fallback"])
"""


def test_an_interruption_while_converters_are_loaded() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(_IMPORT)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
