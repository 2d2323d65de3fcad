"""Many threads call compiled models while others compile and clear the cache; says what it saw.

    python tests/stress_threads.py --threads 32 --calls 200

The calls are made in parts, two unless told, and each is followed by a look at the memory.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_VALUES = 4
_SIZES = (3, 5, 8, 13)


@dataclass
class Case:
    """A compiled model, arguments, and what eager gives for them.

    Attributes:
        grad: whether gradients are wanted; they are the last of the results.
        random: whether eager gives something else each time: numbers between 0 and 1.
    """

    name: str
    call: Callable[..., Any]
    arguments: list[tuple[torch.Tensor, ...]]
    expected: list[list[torch.Tensor]]
    grad: bool = False
    random: bool = False

    def run(self, which: int) -> None:
        """Call it, and see that the results are right."""
        got = results(self.call, self.arguments[which], self.grad)
        if self.random:
            assert all(float(r.min()) >= 0 and float(r.max()) < 1 for r in got)
            return
        for one, other in zip(got, self.expected[which], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def results(
    function: Callable[..., Any], arguments: tuple[torch.Tensor, ...], grad: bool
) -> list[torch.Tensor]:
    """What a function gives, and its gradients."""
    if not grad:
        return [function(*arguments)]
    own = [a.detach().requires_grad_() if a.is_floating_point() else a for a in arguments]
    weights = [p for p in getattr(function, "parameters", list)() if p.requires_grad]
    result = function(*own)
    return [result.detach(), *torch.autograd.grad(result.square().sum(), [*own, *weights])]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.taken, self.given = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.taken(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(*parts)
        return x + self.given(heads.transpose(1, 2).flatten(2))


def cases() -> list[Case]:
    """Eight models, compiled at their first calls."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 16)).eval()
    convolutions = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)
    ).eval()
    trained = nn.Sequential(nn.Linear(12, 20), nn.SiLU(), nn.LayerNorm(20), nn.Linear(20, 4))
    rows = lambda: torch.randn(6, 24)  # noqa: E731
    made = [
        ("mlp", mlp, rows, {}, {}),
        ("no library", mlp.forward, rows, {}, {"options": {"library": "none"}}),
        ("convolutions", convolutions, lambda: torch.randn(2, 3, 12, 12), {}, {}),
        ("attention", Attention().eval(), lambda: torch.randn(2, 7, 32), {}, {}),
        ("one kernel", lambda x: x + 1, lambda: torch.randn(16), {}, {}),
        ("in PyTorch", lambda x: torch.fft.rfft(x).abs() * 2, lambda: torch.randn(4, 32), {}, {}),
        ("random", lambda x: torch.rand_like(x).square(), rows, {"random": True}, {}),
        ("trained", trained, lambda: torch.randn(5, 12), {"grad": True}, {}),
    ]
    found = []
    for name, model, make, how, options in made:
        arguments = [(make(),) for _ in range(_VALUES)]
        grad = bool(how.get("grad"))
        with torch.set_grad_enabled(grad):
            expected = [results(model, a, grad) for a in arguments]
        compiled = torch.compile(model, backend="relax", **options)
        found.append(Case(name, compiled, arguments, expected, **how))
    sized = lambda x, w: torch.softmax(x @ w, -1).cumsum(0)  # noqa: E731
    w = torch.randn(10, 6)
    arguments = [(torch.randn(size, 10), w) for size in _SIZES]
    compiled = torch.compile(sized, backend="relax", dynamic=True)
    found[4] = Case("sizes", compiled, arguments, [[sized(*a)] for a in arguments])
    return found


_numbers = itertools.count()


def _begin() -> None:
    """At the start of each thread, which has settings of its own."""
    torch._dynamo.config.recompile_limit = 64


def compile_another() -> None:
    """Compile a function that was not there before, and see that it is right."""
    number = next(_numbers)
    source = f"def f(x, y):\n    return ((x * {number + 2}.5).tanh() @ y).relu() % {2 + number % 5}"
    scope: dict[str, Any] = {}
    exec(compile(source, f"<function {number}>", "exec"), scope)
    x, y = torch.randn(5 + number % 3, 8), torch.randn(8, 4)
    fast = torch.compile(scope["f"], backend="relax", dynamic=False)
    for _ in range(2):
        torch.testing.assert_close(fast(x, y), scope["f"](x, y), rtol=1e-4, atol=1e-4)


_CLEAR = "from fx2relax.cli import main; main(['cache', 'clear', '--yes'])"


def clear(stop: threading.Event, cleared: list[int]) -> None:
    """Remove what the cache holds, again and again; once by the command."""
    from fx2relax import contents

    command = subprocess.Popen([sys.executable, "-c", _CLEAR], stdout=subprocess.DEVNULL)
    while not stop.wait(0.05):
        cleared.append(contents.remove(contents.items()))
    assert command.wait() == 0


def resident() -> float:
    """The memory of this process that is in use, in MB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Crowd:
    """Threads that call the cases, in parts.

    Args:
        found: the cases.
        threads: how many.
        calls: how many calls each makes.
        compiles: how many functions each of two more threads compiles in each part.
        parts: how many parts there are.
    """

    def __init__(
        self, found: list[Case], threads: int, calls: int, compiles: int, parts: int
    ) -> None:
        self.cases, self.threads, self.parts = found, threads, parts
        self.calls, self.compiles = calls // parts, compiles
        self.errors: list[str] = []
        self.memory: list[float] = []
        self.graphs: list[int] = []

    def run(self) -> None:
        """Run all parts."""
        from fx2relax import stats

        for part in range(self.parts):
            own = [threading.Thread(target=self._call, args=(part, n)) for n in range(self.threads)]
            own += [threading.Thread(target=self._compile) for _ in range(2)]
            for thread in own:
                thread.start()
            for thread in own:
                thread.join()
            self.memory.append(resident())
            self.graphs.append(stats()["graphs"])

    def warm_up(self) -> None:
        """Call each case until nothing is compiled for it any more."""
        from fx2relax import wait_for_compilation

        for _ in range(2):
            for case in self.cases:
                for grad in (False, True):
                    torch.set_num_threads(1 + grad)
                    with torch.set_grad_enabled(grad or case.grad):
                        for turn in range(10):
                            case.run(turn % _VALUES)
            wait_for_compilation()

    def _call(self, part: int, number: int) -> None:
        chance = random.Random(f"{part} {number}")
        _begin()
        # Dynamo compiles for either mode and for each number of threads.
        grad = number % 2 == 0
        torch.set_num_threads(1 + grad)
        try:
            for _ in range(self.calls):
                case = chance.choice(self.cases)
                with torch.set_grad_enabled(grad or case.grad):
                    case.run(chance.randrange(_VALUES))
        except BaseException as error:
            self.errors.append(f"{case.name}: {type(error).__name__}: {error}")

    def _compile(self) -> None:
        _begin()
        try:
            for _ in range(self.compiles):
                with torch.no_grad():
                    compile_another()
        except BaseException as error:
            self.errors.append(f"compiling: {type(error).__name__}: {error}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=32)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--compiles", type=int, default=4)
    parser.add_argument("--cases", type=int, default=8, help="how many models")
    parser.add_argument("--warm", action="store_true", help="compile all before the first part")
    parser.add_argument("--parts", type=int, default=2, help="of the calls")
    parser.add_argument("--seconds", type=float, default=600, help="to be taken for a deadlock")
    given = parser.parse_args()
    faulthandler.enable()
    faulthandler.dump_traceback_later(given.seconds, exit=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(FX2RELAX_CACHE="1", FX2RELAX_CACHE_DIR=folder)
        os.environ.update(FX2RELAX_BACKGROUND="1", FX2RELAX_NEVER_SLOWER="1")
        import fx2relax

        _begin()
        crowd = Crowd(
            cases()[-given.cases :], given.threads, given.calls, given.compiles, given.parts
        )
        stop, cleared = threading.Event(), []
        clearing = threading.Thread(target=clear, args=(stop, cleared))
        clearing.start()
        start = time.perf_counter()
        if given.warm:
            crowd.warm_up()
        crowd.run()
        waited = fx2relax.wait_for_compilation(given.seconds)
        stop.set()
        clearing.join()
        counted = fx2relax.stats()
    print(
        json.dumps(
            {
                "errors": crowd.errors,
                "memory": crowd.memory,
                "cleared": len([size for size in cleared if size]),
                "seconds": time.perf_counter() - start,
                "waited": waited,
                "graphs": crowd.graphs,
                "calls": counted["calls"],
                "fallback": counted["nodes_fallback"],
            }
        )
    )
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
