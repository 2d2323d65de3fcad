"""The process that tunes: crashes, ends, is killed and resumed, measures on other devices."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from tune_cases import MAIN, MODEL, lowered, named, usual_environment, wait
from tune_cases import tuning_settings as tuning_settings

from fx2relax import compat
from fx2relax.errors import OptionError
from fx2relax.pipeline.target import host_target
from fx2relax.tune_options import Fleet, Tune
from fx2relax.tuning import measure, session
from fx2relax.tuning.database import Database

pytestmark = pytest.mark.usefixtures("tuning_settings")


# The process that tunes.

_FALLS = """
    import os, sys
    from fx2relax.tuning import search, worker

    def falls(place, arguments, own, other, name):
        {how}

    search.compare = falls
    sys.exit(worker.main())
"""


class _Enough(Exception):
    """What a test wanted to see has happened."""


@pytest.mark.sweep(2)
@pytest.mark.parametrize("how", ["os.abort()", "import time; time.sleep(600)"])
def test_a_candidate_that_brings_its_process_down(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "falls.py"
    script.write_text(textwrap.dedent(_FALLS.format(how=how)))
    popen, started = subprocess.Popen, []

    def start(command: list[str], **more: Any) -> Any:
        started.append(command)
        if len(started) == 1:  # the first process falls with its first candidate
            command = [sys.executable, str(script)]
        return popen(command, **more)

    monkeypatch.setattr(session.subprocess, "Popen", start)
    seen: list[dict[str, Any]] = []

    def stop() -> None:
        if any("tried" in step and "failed" not in step for step in seen):
            raise _Enough

    kernel, wishes = named(lowered(), "softmax"), Tune(600.0, str(tmp_path))
    silent = 3.0 if "sleep" in how else 300.0
    with pytest.raises(_Enough):
        session.run([kernel], host_target(), wishes, tell=seen.append, silent=silent, stop=stop)
    assert len(started) >= 2
    fallen = next(step["trying"] for step in seen if "trying" in step)
    assert sum(step.get("trying") == fallen for step in seen) == 1
    known = Database(host_target(), tmp_path).read()[kernel.key]
    assert fallen in known.tried
    assert fallen in known.revoked


def test_it_ends_when_it_is_no_longer_wanted(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def stop() -> None:
        if any("tried" in step for step in seen):
            raise _Enough

    kernel = named(lowered(), "softmax")
    with pytest.raises(_Enough):
        session.run(
            [kernel], host_target(), Tune(600.0, str(tmp_path)), tell=seen.append, stop=stop
        )


def test_killed_and_resumed(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    folder = tmp_path / "database"
    command = [sys.executable, "-c", MAIN, "tune", f"{tmp_path / 'model.py'}:net"]
    command += ["--database", str(folder), "--threads", "1", "--seconds"]
    environment = usual_environment()
    process = subprocess.Popen([*command, "600"], stdout=subprocess.DEVNULL, env=environment)

    def records() -> list[dict[str, Any]]:
        lines = [line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
        return [json.loads(line) for line in lines[:-1]]

    try:
        wait(lambda: sum("digest" in record for record in records()) >= 3)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait(lambda: not _running(folder))
    (file,) = folder.glob("*.jsonl")
    with file.open("ab") as half:
        half.write(b'{"kernel": "')
    before = {one["digest"] for one in records() if "digest" in one}
    assert before
    done = subprocess.run(
        [*command, "2", "--json"], capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert sum(kernel["tried"] for kernel in said["kernels"]) >= len(before) + said["tried"]
    digests = []
    for line in file.read_text().splitlines():
        if line.endswith("}"):
            record = json.loads(line)
            digests += [record["digest"]] if "ratio" in record or "failed" in record else []
    assert len(digests) == len(set(digests)), "a candidate was measured twice"
    assert before <= set(digests)


def _running(folder: Path) -> bool:
    """Whether a process still tunes into a folder: it ends with the one that started it."""
    size = [path.stat().st_size for path in folder.glob("*.jsonl")]
    time.sleep(1.0)
    return size != [path.stat().st_size for path in folder.glob("*.jsonl")]


# On other devices.


def test_devices_of_a_tracker(tmp_path: Path) -> None:
    from tvm.rpc.tracker import Tracker

    rpc = compat.rpc()
    tracker = Tracker(host="127.0.0.1", port=19190, port_end=19990, silent=True)
    servers = [
        rpc.Server(
            host="127.0.0.1",
            port=18090,
            port_end=18990,
            tracker_addr=("127.0.0.1", tracker.port),
            key="here",
            silent=True,
        )
        for _ in range(2)
    ]
    try:
        address = f"127.0.0.1:{tracker.port}"
        client = rpc.connect_tracker("127.0.0.1", tracker.port)
        wait(lambda: len(client.summary()["server_info"]) == 2)
        kernel = named(lowered(), "softmax")
        place = measure.Remote(Fleet(address, "here"), host_target(), 60)
        assert place.width == 2
        wishes = Tune(6.0, str(tmp_path), Fleet(address, "here"))
        done = session.run([kernel], host_target(), wishes)
        assert done.tried - done.failed >= 1, done.steps
        known = Database(host_target(), tmp_path).read()[kernel.key]
        assert len(known.tried) == done.tried
        with pytest.raises(OptionError, match="no device 'elsewhere'; start one by"):
            measure.Remote(Fleet(address, "elsewhere"), host_target(), 60)
    finally:
        for server in servers:
            server.terminate()
        tracker.terminate()


def test_there_is_no_tracker(tmp_path: Path) -> None:
    kernel = named(lowered(), "softmax")
    wishes = Tune(1.0, str(tmp_path), Fleet("127.0.0.1:9", "here"))
    with pytest.raises(OptionError, match=r"no tracker answers .*rpc_tracker"):
        session.run([kernel], host_target(), wishes)
