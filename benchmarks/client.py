"""The driver's end of a worker process."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

from benchmarks.sides import environment

ROOT = Path(__file__).parents[1]


class WorkerFailed(RuntimeError):
    """A request that failed; the message is its reason in one line."""


class Client:
    """Starts a worker and asks it.

    Args:
        threads: threads that it computes with.
        cache: the folder of all its caches.
        log: the file that its messages are added to.
        timeout: seconds after which a request has failed.
    """

    def __init__(self, threads: int, cache: Path, log: Path, timeout: float) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log, self.timeout = log, timeout
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env={**os.environ, **environment(threads, str(cache))},
            )
        assert self.process.stdout is not None
        self.answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.answers.put(line)
        self.answers.put(None)

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Send a request, give the answer. Raises WorkerFailed."""
        stdin = self.process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps({"do": do, **request}) + "\n")
            stdin.flush()
            line = self.answers.get(timeout=self.timeout)
        except BrokenPipeError:
            line = None
        except queue.Empty:
            self.process.kill()
            raise WorkerFailed(f"no answer to {do} within {self.timeout:.0f} s") from None
        if line is None:
            raise WorkerFailed(f"{do}: {self._end()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(answer["error"])
        return answer

    def _end(self) -> str:
        """How the process ended."""
        code = self.process.wait()
        if code < 0:
            return f"the process was ended by {signal.Signals(-code).name}"
        lines = self.log.read_text(errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"the process ended with {code}: {last}"[:240]

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
