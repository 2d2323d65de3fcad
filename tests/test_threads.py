"""Compiled models are called, compiled and dropped in many threads at once."""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fx2relax
from fx2relax import backend
from fx2relax.compat import BlockBuilder, relax, threads_apart, tvm
from fx2relax.errors import BuildFailure
from fx2relax.pipeline import llvm_turns
from fx2relax.pipeline.target import host_target, without_loop_vectorizer
from fx2relax.runtime import torch_call, weights

_STRESS = Path(__file__).with_name("stress_threads.py")


pytestmark = pytest.mark.usefixtures("fresh")


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run some work in threads that begin at once; what they raise is raised."""
    barrier = threading.Barrier(count)

    def run(number: int) -> Any:
        barrier.wait(60)
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def _stress(*arguments: str) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FX2RELAX_")}
    done = subprocess.run(
        [sys.executable, str(_STRESS), *arguments],
        env=environment | {"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["errors"] == []
    assert found["waited"]
    assert found["cleared"] > 0
    return found


def test_threads_that_call_compile_and_clear() -> None:
    _stress("--threads", "6", "--calls", "40", "--compiles", "1", "--cases", "4")


@pytest.mark.whole
def test_many_threads_that_call_compile_and_clear() -> None:
    calls = ["--calls", "1200", "--parts", "6", "--compiles", "4"]
    found = _stress("--threads", "32", *calls)
    # In the first parts Dynamo compiles the models for what the threads have set, and in each of
    # the heaps that the C library gives them (eight per core) lies what compiling needs once.
    memory, graphs = found["memory"][2:], found["graphs"][2:]
    compiled = graphs[-1] - graphs[0]
    assert compiled >= 3 * 8, found  # two threads, four functions in each part
    assert memory[-1] - memory[0] < min(48, compiled), found


@pytest.mark.whole
def test_memory_is_level_where_nothing_is_compiled() -> None:
    calls = ["--calls", "1600", "--parts", "16", "--compiles", "0", "--cases", "4", "--warm"]
    found = _stress("--threads", "6", *calls)
    # Dynamo compiles again where the threads change each other's settings.
    parts = pairwise(zip(found["memory"], found["graphs"], strict=True))
    grown = [after - before for (before, old), (after, new) in parts if old == new]
    assert len(grown) > 4, found
    assert statistics.median(grown) < 0.5, found


def test_graphs_are_imported_in_threads_at_once() -> None:
    class Net(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number, self.linear = number, nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(10):
                x = (self.linear(x) + self.number).sin()
            return x

    exported = [torch.export.export(Net(n), (torch.randn(2, 8),)) for n in range(4)]
    alone = [fx2relax.from_fx(program) for program in exported]

    def work(number: int) -> Any:
        made = [fx2relax.from_fx(exported[number % 4]) for _ in range(3)]
        assert BlockBuilder.current() is None
        return made

    for number, made in enumerate(together(8, work)):
        for mod in made:
            tvm.ir.assert_structural_equal(mod, alone[number % 4])


def test_threads_are_apart_where_nobody_has_imported_tvm() -> None:
    script = """
        import sys
        from fx2relax.compat import relax, te, threads_apart
        assert "tvm" not in sys.modules
        threads_apart()
        assert not isinstance(relax.BlockBuilder._stack, list)
        assert "_current" not in vars(te.tag.TagScope)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=120)


def test_a_builder_belongs_to_its_thread() -> None:
    builder = BlockBuilder()
    with builder.function("f", [relax.Var("x", relax.TensorType([2], "float32"))]):
        assert BlockBuilder.current() is builder
        assert together(1, lambda _: BlockBuilder.current()) == [None]
        builder.emit_func_output(relax.const(1.0))
    assert BlockBuilder.current() is None


def test_a_tag_belongs_to_its_thread() -> None:
    threads_apart()
    both = threading.Barrier(2)

    def work(number: int) -> None:
        for turn in range(50):
            with tvm.te.tag_scope(f"{number} {turn}"):
                both.wait(60)
                assert tvm.te.tag.TagScope.get_current().tag == f"{number} {turn}"
                both.wait(60)

    together(2, work)
    with (
        pytest.raises(ValueError, match="nested"),
        tvm.te.tag_scope("a"),
        tvm.te.tag_scope("b"),
    ):
        pass
    assert tvm.te.tag.TagScope.get_current() is None


def test_what_could_not_be_compiled_runs_in_threads_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> Any:
        raise BuildFailure("broken by the test")

    monkeypatch.setattr(backend._Compiler, "_build", broken)

    def function(x: torch.Tensor) -> torch.Tensor:
        for n in range(20):
            x = (x * 1.01 + n).sin()
        return x

    fast = torch.compile(function, backend="relax")
    inputs = [torch.randn(5) for _ in range(8)]
    expected = [function(x) for x in inputs]
    fast(inputs[0])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:

        def work(number: int) -> None:
            for _ in range(50):
                torch.testing.assert_close(fast(inputs[number]), expected[number])

        together(8, work)
    finally:
        sys.setswitchinterval(interval)


def test_who_changes_llvms_options_is_alone() -> None:
    plain = host_target()
    targets = [plain, without_loop_vectorizer(plain)]
    inside: list[int] = []
    most: list[tuple[int, int]] = []

    def work(number: int) -> None:
        kind = number % 2
        for _ in range(20):
            with llvm_turns.generating(targets[kind]):
                inside.append(kind)
                most.append((inside.count(0), inside.count(1)))
                assert inside.count(1) == 0 or len(inside) == 1
                inside.remove(kind)

    together(8, work)
    assert {ones for _, ones in most} == {0, 1}


def test_masks_are_compiled_in_threads_at_once() -> None:
    """LLVM gets remainders wrong where the option is lost that a neighbour has put back."""
    functions = [lambda x, n=n: x.repeat(8)[torch.arange(64) % 4] * n for n in range(1, 5)]
    x = torch.randn(16)

    fast = [torch.compile(f, backend="relax", dynamic=False) for f in functions]

    def work(number: int) -> None:
        torch.testing.assert_close(fast[number](x), functions[number](x))

    together(4, work)


def test_what_is_made_of_weights_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    renew = weights.Weights._renew

    def counted(self: Any, *arguments: Any) -> Any:
        made.append(threading.get_ident())
        return renew(self, *arguments)

    monkeypatch.setattr(weights.Weights, "_renew", counted)
    net, x = (
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval(),
        torch.randn(3, 64),
    )
    fast = torch.compile(net, backend="relax")
    with torch.no_grad():
        fast(x)
        made.clear()
        for _ in range(5):
            net[0].weight.mul_(1.5)
            expected = net(x)

            def work(_: int, expected: torch.Tensor = expected) -> None:
                with torch.no_grad():
                    torch.testing.assert_close(fast(x), expected)

            together(8, work)
    assert len(made) <= 5


def test_an_error_reaches_the_thread_that_made_it() -> None:
    @torch.library.custom_op("fx2relax_tests::picky", mutates_args=())
    def picky(x: torch.Tensor) -> torch.Tensor:
        if x[0] > 0:
            raise ZeroDivisionError(f"number {int(x[0])}")
        return x.clone()

    @picky.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    fast = torch.compile(lambda x: torch.ops.fx2relax_tests.picky(x * 1) + 1, backend="relax")
    fast(torch.zeros(4))

    def work(number: int) -> None:
        for turn in range(20):
            if (number + turn) % 3:
                with pytest.raises(ZeroDivisionError, match=f"number {number + 1}$"):
                    fast(torch.full((4,), float(number + 1)))
            else:
                torch.testing.assert_close(fast(torch.zeros(4)), torch.ones(4))

    together(8, work)


def test_no_call_is_lost_from_the_count() -> None:
    fast, x = torch.compile(lambda x: x + 1, backend="relax"), torch.randn(16)
    fast(x)
    fx2relax.reset_stats()
    together(8, lambda _: [fast(x) for _ in range(500)])
    assert fx2relax.stats()["calls"] == 4000
    assert fx2relax.stats()["calls"] == 4000
    fast(x)
    assert fx2relax.stats()["calls"] == 4001


def test_programs_are_collected_while_others_are_registered() -> None:
    """A collection of garbage comes at any moment, and in the thread that holds the lock."""

    class Call:
        target = staticmethod(lambda: None)

    torch_call.register({"fx2relax.tests.gone": Call()})  # type: ignore[dict-item]
    with torch_call._lock:
        torch_call.unregister(["fx2relax.tests.gone"])
        assert "fx2relax.tests.gone" in torch_call._live
    torch_call.register({"fx2relax.tests.next": Call()})  # type: ignore[dict-item]
    assert "fx2relax.tests.gone" not in torch_call._live
    torch_call.unregister(["fx2relax.tests.next"])
    assert "fx2relax.tests.next" not in torch_call._live


def test_gradients_in_threads_at_once() -> None:
    """With sizes that are symbols PyTorch may compile the backward when it is first run."""
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    fast = torch.compile(net, backend="relax", dynamic=True)

    def gradients(function: Any, x: torch.Tensor) -> Any:
        return torch.autograd.grad(function(x).square().sum(), list(net.parameters()))

    inputs = [torch.randn(n + 2, 8) for n in range(8)]
    expected = [gradients(net, x) for x in inputs]

    def work(number: int) -> None:
        for turn in range(10):
            which = (number + turn) % 8
            torch.testing.assert_close(gradients(fast, inputs[which]), expected[which])

    together(8, work)
    gc.collect()


_THREADS = """
    import threading, torch
    from pathlib import Path
    torch.set_num_threads(1)
    f = torch.compile(lambda x: (x * 2).tanh(), backend="relax", options={"never_slower": False})
    x = torch.randn(1 << 20)
    f(x)
    tasks = lambda: len(list(Path("/proc/self/task").iterdir()))
    seen = []
    def work():
        before = tasks()
        f(x)
        seen.append(tasks() - before)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    print(seen)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads cannot be counted")
def test_kernels_use_as_many_threads_as_pytorch_was_told() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_THREADS)],
        env={**os.environ, "OMP_NUM_THREADS": "4"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (0, "[0]\n"), done.stderr
