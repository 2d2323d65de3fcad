"""Run the probes in a process of their own, and hear of each as it ends."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fx2relax import another_python
from fx2relax.doctor.stages import MARK, STAGES

# The native helper takes half a minute on a slow machine.
_SECONDS = 240.0
_START = "from fx2relax.doctor import probes; probes.main()"


@dataclass
class Probed:
    """What the probes found.

    Attributes:
        facts: by the names of the stages that ended well.
        errors: what was raised, as ``Type: message``, or how the process ended.
        kinds: the type of each error; ``crash`` or ``hang`` where nothing was raised.
    """

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)

    def get(self, stage: str) -> dict[str, Any]:
        """The facts of a stage; empty where it failed or was not reached."""
        return self.facts.get(stage, {})


def probe(step: Callable[[str], None], seconds: float = _SECONDS) -> Probed:
    """Run all probes.

    Args:
        step: told which stage begins.
        seconds: how long one may take.
    """
    found = Probed()
    env = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    with contextlib.ExitStack() as stack:
        try:
            said = stack.enter_context(tempfile.TemporaryFile())
        except OSError:  # no temporary folder can be written to
            said = stack.enter_context(open(os.devnull, "w+b"))
        try:
            process = subprocess.Popen(
                another_python.command(_START),
                stdout=subprocess.PIPE,
                stderr=said,
                env=env,
                start_new_session=True,
            )
        except OSError as error:
            _failed(found, STAGES[0], "crash", f"{sys.executable} cannot be started: {error}")
            return found
        try:
            stage = _listen(process, found, step, seconds)
        finally:
            _end(process)
        if stage is not None:
            said.seek(0)
            kind = found.kinds.get(stage, "crash")
            _failed(found, stage, kind, _ending(process.returncode, kind, said.read(), seconds))
    return found


def _listen(
    process: subprocess.Popen[bytes], found: Probed, step: Callable[[str], None], seconds: float
) -> str | None:
    """Collect what is said; the stage in which the process ended without a word, if it did."""
    lines: queue.Queue[bytes | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    stage: str | None = STAGES[0]
    while True:
        try:
            line = lines.get(timeout=seconds)
        except queue.Empty:
            if stage is not None:
                found.kinds[stage] = "hang"
            return stage
        if line is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            return stage
        if not line.startswith(MARK.encode()):
            continue  # what a library prints
        said = json.loads(line[len(MARK) :])
        if "begins" in said:
            stage = said["begins"]
            step(f"trying {stage}")
        elif "ended" in said:
            stage = None
        elif "error" in said:
            _failed(found, said["stage"], said["kind"], said["error"])
        else:
            found.facts[said["stage"]] = said["facts"]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and the compilers that it may have started."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def _failed(found: Probed, stage: str, kind: str, error: str) -> None:
    found.errors[stage], found.kinds[stage] = error, kind


def _ending(code: int, kind: str, said: bytes, seconds: float) -> str:
    if kind == "hang":
        return f"nothing was heard for {seconds:.0f} seconds"
    last = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
    first = next((line for line in last if line.startswith("Fatal Python error")), "")
    why = first or (last[-1] if last else "it said nothing")
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"the process died of {signal.Signals(-code).name}: {why}"
    return f"the process ended with {code}: {why}"
