"""The processes that the benchmarks time in: their environment, and how they end."""

from __future__ import annotations

import os
import subprocess
import sys

import benchmarks_found  # noqa: F401
import pytest

from benchmarks.client import Client, WorkerFailed
from benchmarks.sides import environment


def test_a_worker_keeps_bytecode(tmp_path, monkeypatch):
    """As an installed package has it, so that no side compiles its own sources at each start."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    (tmp_path / "imported.py").write_text("")
    run = [sys.executable, "-c", "import imported"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run(run, check=True, env=env)
    assert not (tmp_path / "__pycache__").exists()
    subprocess.run(run, check=True, env={**env, **environment(1, str(tmp_path / "cache"))})
    assert list((tmp_path / "__pycache__").glob("imported.*.pyc"))


def test_a_worker_that_dies_is_reported(tmp_path):
    client = Client(1, tmp_path, tmp_path / "log", 60)
    try:
        with pytest.raises(WorkerFailed, match="AttributeError"):
            client.ask("no_such_request")
        client.process.kill()
        with pytest.raises(WorkerFailed, match="ended by SIGKILL"):
            client.ask("compile")
    finally:
        client.close()


def test_a_worker_that_hangs_is_ended(tmp_path):
    client = Client(1, tmp_path, tmp_path / "log", 0.05)
    with pytest.raises(WorkerFailed, match="no answer to load"):
        client.ask(
            "load",
            side="eager",
            case="prime",
            batch=1,
            threads=1,
            mode="inference",
            cache=str(tmp_path / "cache"),
        )
    client.close()
    assert client.process.poll() is not None
