"""A process that compiles one case with one side, and times calls when it is told to.

Each line of its standard input is a request in JSON, each line of its standard output the answer.
What libraries print goes to standard error.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import memory
from benchmarks.cases import CASES
from benchmarks.sides import SIDES, Setup, SideFailed, split

#: The package of the sides that are ours.
OWN = "fx2relax"
# Ours has begun all that it compiles by then.
_BEGUN = 2
# Ours has chosen by then how to run a graph.
_SETTLED = 8


def reason(error: BaseException) -> str:
    """An error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {' '.join(lines[:3])}" if lines else type(error).__name__
    return text if len(text) <= 240 else text[:237] + "..."


class Worker:
    """One case under one side. Its public methods are the requests."""

    def load(
        self,
        side: str,
        case: str,
        batch: int,
        threads: int,
        mode: str,
        cache: str,
        exact: bool = False,
        device: str = "cpu",
        dtype: str = "float32",
    ) -> dict[str, Any]:
        """Import the side, build the case; all of it in float64 if it is to be exact."""
        self.device = device
        self.memory: Any = memory
        name, options = split(side)
        self.side, self.mode = SIDES[name], mode
        self.setup = Setup(threads, cache, options)
        os.makedirs(cache, exist_ok=True)
        start = time.perf_counter()
        import torch

        for package in {self.side.needs} - {"torch"}:
            __import__(package)
        seconds = time.perf_counter() - start
        if device == "cuda":
            from benchmarks import gpu

            self.memory = gpu
        imported = self.memory.held()
        torch.set_num_threads(threads)
        model, self.args = CASES[case].build(batch)
        if exact:
            from benchmarks.agreement import doubled

            model, self.args = model.double(), tuple(doubled(self.args))
        elif dtype != "float32":
            kind = getattr(torch, dtype)
            model = model.to(kind)
            self.args = tuple(a.to(kind) if a.is_floating_point() else a for a in self.args)
        self.rough = dtype != "float32"
        model, self.args = model.to(device), tuple(a.to(device) for a in self.args)
        self.model = model.train(mode == "train")
        gc.collect()
        weights = {w.data_ptr(): w.nbytes for w in model.parameters()}
        answer = {
            "import_seconds": seconds,
            "imported": imported,
            "loaded": self.memory.held(),
            "load_peak": self.memory.peak(),
            "weights": sum(weights.values()) / 2**20,
        }
        self.memory.reset_peak()
        return answer

    def compile(self) -> dict[str, Any]:
        """Compile, and make the first call, which is when most sides compile."""
        import torch

        start = time.perf_counter()
        self.compiled = self.side.compile(self.model, self.setup)
        if self.mode == "train":
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        with self._context():
            self.first = self._call()
            self._wait()
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "peak": self.memory.peak(),
            "held": self.memory.held(),
            "children_peak": self.memory.children_peak(),
        }

    def save(self, path: str) -> dict[str, Any]:
        """Keep the first call's results for the other sides to be held to."""
        import torch

        torch.save(self._results(), path)
        del self.first
        self.memory.reset_peak()
        return {}

    def check(self, path: str, exact: str | None) -> dict[str, Any]:
        """Compare the first call's results with those that eager has saved, also in float64."""
        import torch

        from benchmarks.agreement import TOLERANCE, as_exact, errors

        results, eager = self._results(), torch.load(path)
        absolute, relative = errors(results, eager)
        right = relative <= TOLERANCE["autocast" if self.rough else self.mode]
        right = right or (exact is not None and as_exact(results, eager, torch.load(exact)))
        del self.first, results, eager
        gc.collect()
        self.memory.reset_peak()
        return {"absolute": absolute, "relative": relative, "right": right}

    def warm(self, seconds: float) -> dict[str, Any]:
        """Call until the time is up and all has settled; give the last call's time in ms.

        Ours compiles in the background from its second call on; this waits for it.
        """
        with self._context():
            end = time.perf_counter() + seconds
            if self.side.needs == OWN:
                import fx2relax

                for _ in range(_BEGUN):
                    self._call()
                fx2relax.wait_for_compilation()
                end = time.perf_counter() + seconds
                for _ in range(_SETTLED - 1):
                    self._call()
            while True:
                start = time.perf_counter()
                self._call()
                self._wait()
                now = time.perf_counter()
                if now >= end:
                    return {"ms": 1000 * (now - start)}

    def time(self, calls: int, untimed: int) -> dict[str, Any]:
        """The mean time of `calls` calls in ms, after `untimed` others that fill the caches."""
        with self._context():
            for _ in range(untimed):
                self._call()
            call = self._call
            if self.device == "cuda":
                from benchmarks import gpu

                return {"ms": gpu.milliseconds(call, calls) / calls}
            start = time.perf_counter()
            for _ in range(calls):
                call()
            return {"ms": 1000 * (time.perf_counter() - start) / calls}

    def finish(self) -> dict[str, Any]:
        """Memory after all calls, and what the side did not do itself."""
        notes: dict[str, Any] = {}
        if self.setup.fallbacks:
            notes["fallbacks"] = self.setup.fallbacks
        if self.side.needs == OWN:
            import fx2relax

            stats = fx2relax.stats()
            notes["stats"] = stats
            if stats["nodes_fallback"]:
                notes["fallbacks"] = [f"{n} x {op}" for op, n in stats["fallback_ops"].items()]
        return {"peak": self.memory.peak(), "held": self.memory.held(), "notes": notes}

    def _wait(self) -> None:
        """Until a GPU has done what the last call launched."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        """What the calls run under; entered once for many, so that it is not timed."""
        import torch

        with torch.set_grad_enabled(self.mode == "train"):
            if self.mode == "autocast":
                with torch.autocast(self.device, torch.bfloat16):
                    yield
            else:
                yield

    @property
    def _call(self) -> Callable[[], Any]:
        compiled, args = self.compiled, self.args
        return self._step if self.mode == "train" else lambda: compiled(*args)

    def _step(self) -> Any:
        """One step: forward, a loss, backward, plain gradient descent."""
        from torch.utils import _pytree as pytree

        self.optimizer.zero_grad()
        outputs = pytree.tree_leaves(self.compiled(*self.args))
        loss = sum(out.float().square().mean() for out in outputs)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _results(self) -> list[Any]:
        """What the first call gave: outputs and all it may have written to, or loss and gradients.

        As copies: a side may write its next result where this one is.
        """
        import torch
        from torch.utils import _pytree as pytree

        found = pytree.tree_leaves(self.first)
        if self.mode == "train":
            found += [w.grad for w in self.model.parameters() if w.grad is not None]
        else:
            found += [*self.args, *self.model.buffers()]
        return [x.detach().clone() for x in found if isinstance(x, torch.Tensor)]


def main() -> None:
    """Answer requests until there are none."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except SideFailed as error:
            answer = {"error": str(error)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": reason(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
