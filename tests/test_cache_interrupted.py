"""The cache stays whole whenever a process is killed, interrupted, or loses its entries."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from cache_cases import COMPILE, ENTRY, WRITE
from cache_cases import own_cache as own_cache
from cache_cases import store as store

from fx2relax import cache, contents, disk


def test_processes_that_are_killed_while_they_write(tmp_path: Path, caplog) -> None:
    chance = random.Random(0)
    store = cache.open_store(limit=3_000_000)
    assert store is not None
    unfinished = 0
    for turn in range(24):
        pair = [
            subprocess.Popen([sys.executable, "-c", WRITE], stdout=subprocess.PIPE)
            for _ in range(2)
        ]
        for process in pair:
            process.stdout.readline()
        time.sleep(chance.uniform(0, 0.05))
        for process in pair:
            process.send_signal(signal.SIGKILL if turn % 3 else signal.SIGTERM)
            process.communicate()
        for key in map(str, range(7)):
            found = store.get(key)
            if found is not None:
                assert found.said == {"n": int(key)}
                assert found.library == bytes([int(key)]) * 700_000
        unfinished = max(unfinished, len(list(store.where.glob(".*.tmp"))))
    assert caplog.records == []
    assert unfinished > 0, "no process was killed at work"
    store.put("8", ENTRY)
    assert list(store.where.glob(".*.tmp"))  # another process may be at it
    for path in store.where.glob(".*.tmp"):
        os.utime(path, (1, 1))
    store.put("9", ENTRY)
    assert not list(store.where.glob(".*.tmp"))
    total = sum(path.stat().st_size for path in store.where.iterdir())
    assert total <= 3_000_000 + 100


def test_an_interrupted_write_leaves_nothing(store, monkeypatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.put("other", ENTRY)
    assert not list(store.where.glob(".*.tmp"))
    assert store.get("other") is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interruption_at_every_line(store) -> None:
    """Ctrl-C comes between any two lines: the entry is the old one or the new one."""
    new = cache.Entry(bytes([1]) * 2000, {"b": 2})
    own = (cache.__file__, disk.__file__)

    def interrupted(at: int) -> bool:
        left = at

        def trace(frame, event, argument):
            nonlocal left
            if frame.f_code.co_filename not in own:
                return None
            if event == "line":
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            store.put("key", new)
            store.note("key", fastest={"()": "eager"})
            store.hit("key")
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    found, at = [], 1
    while interrupted(at):
        found.append(store.get("key"))
        assert store.notes("key") in ({}, {"fastest": {"()": "eager"}})
        left = list(store.where.glob(".*.tmp"))
        assert len(left) <= 1  # where it comes before the file has an owner
        disk.remove([*left, store._notes("key")])
        store.put("key", ENTRY)
        at += 1
    assert at > 30
    assert found.count(ENTRY) > 3
    assert found.count(new) > 3
    assert len(found) == found.count(ENTRY) + found.count(new)


def test_compilations_that_are_killed(tmp_path: Path) -> None:
    """Two interrupted, two killed, at any moment; then one finds nothing or right programs."""
    chance = random.Random(1)
    wrapper = tmp_path / "c++"
    wrapper.write_text('#!/bin/sh\nsleep 0.2\nexec g++ "$@"\n')
    wrapper.chmod(0o755)
    env = {**os.environ, "CXX": str(wrapper)} if shutil.which("g++") else dict(os.environ)
    for how in (signal.SIGKILL, signal.SIGINT) * 2:
        process = subprocess.Popen(
            [sys.executable, "-c", COMPILE],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            text=True,
        )
        process.stdout.readline()
        time.sleep(chance.uniform(0, 7))
        process.send_signal(how)
        said = process.communicate()
        assert process.returncode in (0, -how, 1, 130), said
        if process.returncode == 1:
            assert "KeyboardInterrupt" in said[1]
        for path in (tmp_path / "cache" / "programs").glob("*.program"):
            cache._unpacked(path.read_bytes(), path.stem)
    last = [
        subprocess.run(
            [sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, timeout=500
        )
        for _ in range(2)
    ]
    for done in last:
        assert done.returncode == 0, done.stderr
        assert "compiled again" not in done.stderr
    assert last[1].stderr == ""
    assert int(last[1].stdout.split()[1]) > 0


def test_entries_are_removed_beside_processes_that_use_them(store) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITE], stdout=subprocess.PIPE)
    process.stdout.readline()
    end, removed = time.monotonic() + 2, 0
    while time.monotonic() < end:
        removed += contents.remove(contents.items()) > 0
    assert process.poll() is None, "it goes on"
    process.kill()
    process.communicate()
    assert removed > 10
    contents.remove(contents.items())
    assert contents.items() == []


def test_hits_of_processes_at_once_are_all_counted(store) -> None:
    script = textwrap.dedent("""
        from fx2relax import cache
        store = cache.open_store()
        for _ in range(200):
            store.hit("key")
    """)
    pair = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(3)]
    assert [process.wait() for process in pair] == [0, 0, 0]
    assert (store.where / "key.hits").stat().st_size == 600
