"""A tuning process, watched: what brings it down is written off, and another goes on."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fx2relax import background
from fx2relax.errors import OptionError
from fx2relax.pipeline import tuned
from fx2relax.pipeline.target import described
from fx2relax.tune_options import Tune
from fx2relax.tuning.database import Database
from fx2relax.tuning.kernels import Kernel

log = logging.getLogger("fx2relax")

# A process that says nothing for so many seconds hangs: it compiles and times one kernel between
# two lines. It imports PyTorch before the first, and compiles all kernels by our own rules.
_SILENT, _STARTS = 120.0, 600.0
# Where as many processes in a row came down, it is not for a candidate's sake.
_MOST = 5


@dataclass
class Outcome:
    """What a session did.

    Attributes:
        tried: how many schedules were measured, or failed.
        failed: how many of them failed.
        seconds: of tuning, without what processes take to start.
        crashes: how many processes came down.
        steps: what was told, in order: the lines of `worker` and `search`.
    """

    tried: int = 0
    failed: int = 0
    seconds: float = 0.0
    crashes: int = 0
    steps: list[dict[str, Any]] = field(default_factory=list)


def run(
    kernels: Sequence[Kernel],
    target: Any,
    wishes: Tune,
    *,
    tell: Callable[[dict[str, Any]], None] = lambda step: None,
    nice: int = 0,
    silent: float = _SILENT,
    stop: Callable[[], None] = background.checkpoint,
) -> Outcome:
    """Tune kernels for a while, in a process of its own.

    Args:
        kernels: what there is to tune.
        target: a `tvm.target.Target`.
        wishes: how long, in which database, on which devices.
        tell: is told of every step.
        nice: by how much the process is nicer than this one.
        silent: once it has begun, after as many seconds without a word it is taken to hang.
        stop: called now and then; what it raises ends the process, and is raised.

    Raises:
        OptionError: there is no such tracker or device.
        OSError: the database cannot be written.
    """
    database = Database(target, wishes.database)
    outcome = Outcome()
    left = {kernel.key: kernel for kernel in kernels}
    in_a_row = 0
    while left and outcome.seconds < wishes.seconds and in_a_row < _MOST:
        before = outcome.tried
        job = _job(list(left.values()), target, wishes, wishes.seconds - outcome.seconds, nice)
        watch = _Watch(job, outcome, tell, silent, stop)
        if watch.follow():
            break
        outcome.crashes += 1
        in_a_row = in_a_row + 1 if outcome.tried == before else 1
        for digest, key in watch.trying.items():
            outcome.tried += 1
            outcome.failed += 1
            database.add({"kernel": key, "digest": digest, "failed": watch.why})
            tell({"tried": digest, "kernel": key, "failed": watch.why})
        if watch.starting is not None and not watch.trying:
            left.pop(watch.starting, None)
        log.info("a process that tunes came down: %s", watch.why)
    return outcome


def _job(
    kernels: list[Kernel], target: Any, wishes: Tune, seconds: float, nice: int
) -> dict[str, Any]:
    config, _ = described(target)
    fleet = wishes.fleet
    return {
        "kernels": [
            {"key": k.key, "name": k.name, "calls": k.calls, "tir": tuned.spelled(k.func)}
            for k in kernels
        ],
        "target": config,
        "threads": int(config.get("num-cores", 1)),
        "seconds": seconds,
        "database": wishes.database,
        "fleet": [fleet.tracker, fleet.key] if fleet is not None else None,
        "nice": nice,
    }


class _Watch:
    """One process.

    Attributes:
        trying: the kernels' keys of what is being measured, by its digest.
        starting: the key of the kernel that it looks at first.
        why: what brought it down.
    """

    def __init__(
        self,
        job: dict[str, Any],
        outcome: Outcome,
        tell: Callable[[dict[str, Any]], None],
        silent: float,
        stop: Callable[[], None],
    ) -> None:
        self._job, self._outcome, self._tell = job, outcome, tell
        self._silent, self._stop = silent, stop
        self._spent = 0.0
        self._last: float | None = None
        self.trying: dict[str, str] = {}
        self.starting: str | None = None
        self.why = ""

    def follow(self) -> bool:
        """Start it, and listen until it ends; returns whether it ended well."""
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "fx2relax.tuning.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=_environment(self._job["threads"]),
            )
            try:
                done = self._listen(process)
                if self._last is not None:
                    self._outcome.seconds += time.monotonic() - self._last
            finally:
                process.kill()
                process.wait()
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        _close(pipe)
            if not done and not self.why:
                errors.seek(0)
                last = errors.read()[-2000:].decode(errors="replace").strip()
                self.why = f"the process ended with {process.returncode}: {last[-300:]}"
            return done

    def _listen(self, process: subprocess.Popen[bytes]) -> bool:
        lines: queue.Queue[bytes] = queue.Queue()
        assert process.stdin is not None
        assert process.stdout is not None
        threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
        try:
            process.stdin.write(json.dumps(self._job).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return False
        heard = time.monotonic()
        while True:
            self._stop()
            try:
                line = lines.get(timeout=0.1)
            except queue.Empty:
                limit = _STARTS if self._last is None else self._silent
                if time.monotonic() - heard > limit:
                    self.why = f"nothing was heard for {limit:.0f} s"
                    return False
                continue
            heard = time.monotonic()
            if not line:
                return False
            if self._step(json.loads(line)):
                return True

    def _step(self, step: dict[str, Any]) -> bool:
        """Take notice of a line; returns whether it is the last one."""
        outcome = self._outcome
        if "refused" in step:
            raise OptionError(step["refused"])
        if "starting" in step:
            self.starting = step["starting"]
        elif "ready" in step:
            self.starting, self._last = None, time.monotonic()
        elif "trying" in step:
            self.trying[step["trying"]] = step["kernel"]
        elif "tried" in step:
            self.trying.pop(step["tried"], None)
            outcome.tried += 1
            outcome.failed += "failed" in step
        elif "confirmed" in step or "revoked" in step:
            self.trying.pop(step.get("confirmed") or step["revoked"], None)
        elif "spent" in step:
            outcome.seconds += step["spent"] - self._spent
            self._spent, self._last = step["spent"], time.monotonic()
        outcome.steps.append({**step, "at": outcome.seconds})
        self._tell(step)
        return "done" in step


def _pump(pipe: Any, lines: queue.Queue[bytes]) -> None:
    for line in pipe:
        lines.put(line)
    lines.put(b"")


def _close(pipe: Any) -> None:
    with contextlib.suppress(OSError):  # what was left to be written has no reader
        pipe.close()


def _environment(threads: int) -> dict[str, str]:
    """This process's, and its path of modules: it may have been changed since it started."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}
