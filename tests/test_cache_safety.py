"""The cache runs nothing that its owner did not build, and survives what happens to it."""

from __future__ import annotations

import hashlib
import logging
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
from click.testing import CliRunner

from fx2relax import cache, contents, disk
from fx2relax.cli import main
from fx2relax.runtime import compiled

ROOT = os.name == "posix" and os.geteuid() == 0
as_root = pytest.mark.skipif(not ROOT, reason="only root gives files away")
ENTRY = cache.Entry(bytes(1000), {"a": 1}, {"torch": "2"})


def _mounts() -> bool:
    if not ROOT or not shutil.which("unshare"):
        return False
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(command, capture_output=True).returncode == 0


mounts = pytest.mark.skipif(not _mounts(), reason="takes the right to mount")


@pytest.fixture(autouse=True)
def _settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FX2RELAX_CACHE", "1")
    monkeypatch.setenv("FX2RELAX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(disk, "_told", set())


@pytest.fixture
def store(tmp_path: Path) -> cache.Store:
    made = cache.open_store(limit=1 << 20)
    assert made is not None
    made.put("key", ENTRY)
    assert made.get("key") == ENTRY
    return made


def _linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


FOREIGN = {
    "a link": (_linked, "symbolic link"),
    "a pipe": (_pipe, "no regular file"),
    "open to others": (lambda path: path.chmod(0o622), "others may write"),
    "somebody else's": pytest.param(
        lambda path: os.chown(path, 12345, -1), "another user", marks=as_root
    ),
}
FOREIGN_ROWS = [v if hasattr(v, "marks") else pytest.param(*v) for v in FOREIGN.values()]


@pytest.mark.parametrize(("change", "why"), FOREIGN_ROWS, ids=list(FOREIGN))
def test_a_file_that_others_may_have_put_there(store, caplog, change, why) -> None:
    path = store._path("key")
    change(path)
    assert store.get("key") is None
    assert [record.getMessage().count(why) for record in caplog.records] == [1]
    assert not os.path.lexists(path)
    store.put("key", ENTRY)
    assert store.get("key") == ENTRY


@pytest.mark.parametrize(("change", "why"), FOREIGN_ROWS, ids=list(FOREIGN))
def test_notes_that_others_may_have_put_there(store, change, why) -> None:
    store.note("key", fastest={"()": "eager"})
    change(store._notes("key"))
    assert store.notes("key") == {}


FOLDERS = {
    "a link": (_linked, "symbolic link"),
    "open to a group": (lambda path: path.chmod(0o770), "others may write"),
    "somebody else's": pytest.param(
        lambda path: os.chown(path, 12345, -1), "another user", marks=as_root
    ),
}
FOLDER_ROWS = [v if hasattr(v, "marks") else pytest.param(*v) for v in FOLDERS.values()]


@pytest.mark.parametrize(("change", "why"), FOLDER_ROWS, ids=list(FOLDERS))
@pytest.mark.parametrize("part", ["programs", "native"])
def test_a_folder_of_others(store, caplog, change, why, part) -> None:
    where = disk.root() / part
    disk.own_folder(where)
    change(where)
    for _ in range(3):
        found = cache.open_store() if part == "programs" else compiled.cache_folder("helper.so")
        assert found is None or found == compiled._own_folder()
    assert [record.getMessage().count(why) for record in caplog.records] == [1]


@as_root
def test_a_link_of_another_user_on_the_way(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.setenv("FX2RELAX_CACHE_DIR", str(tmp_path / "link"))
    assert cache.open_store() is not None  # one's own is as good as the folder
    os.chown(tmp_path / "link", 12345, -1, follow_symlinks=False)
    assert cache.open_store() is None


def test_a_native_library_that_others_may_have_put_there(tmp_path: Path) -> None:
    source = tmp_path / "deep.c"
    source.write_text("int thought() { return 42; }\n")
    assert compiled.load("deep", [source]).thought() == 42
    (library,) = disk.native().glob("*.so")
    assert library.stat().st_mode & 0o077 == 0
    library.chmod(0o777)
    assert compiled._loaded(library) is None
    assert compiled.load("deep", [source]).thought() == 42
    assert library.stat().st_mode & 0o077 == 0


def test_native_libraries_are_bounded(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(compiled, "_LIMIT", 40_000)
    for n in range(6):
        source = tmp_path / f"deep{n}.c"
        source.write_text(f"int thought() {{ return {n}; }}\n")
        assert compiled.load(f"deep{n}", [source]).thought() == n
    left = {path.name[:5] for path in disk.native().glob("*.so")}
    assert "deep5" in left
    assert len(left) < 4


def test_no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FX2RELAX_CACHE_DIR", "~nobody-of-that-name/cache")
    assert cache.open_store() is None
    assert list(tmp_path.iterdir()) == []


def _full(*arguments: object, **named: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_is_one_warning(store, caplog, monkeypatch) -> None:
    monkeypatch.setattr(os, "replace", _full)
    for n in range(4):
        store.put(f"other{n}", ENTRY)
    store.hit("key")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "No space left" in caplog.text
    assert store.get("key") == ENTRY
    assert not list(store.where.glob(".*.tmp"))


def test_a_stored_program_outlives_a_full_temporary_folder(store, monkeypatch) -> None:
    """What cannot be loaded for want of space is not damaged."""
    from fx2relax import programs

    monkeypatch.setattr(programs, "load", _full)
    monkeypatch.setattr(programs, "restore", lambda *arguments: None)
    monkeypatch.setattr(programs._Sizes, "hold", lambda self, guards: True)
    monkeypatch.setattr(programs, "_Sizes", lambda graph: type("", (), {"hold": lambda *a: True})())
    monkeypatch.setattr(programs.Calling, "read", lambda said: None)
    store.put("key", cache.Entry(b"", {"guards": None, "imported": {}, "calling": 0, "census": {}}))
    assert programs._restored(store, "key", None, []) is None
    assert store.get("key") is not None


COMPILE = """
import torch, sys
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3)).eval()
print("ready", flush=True)
with torch.no_grad():
    x = torch.randn(4, 6)
    torch.testing.assert_close(torch.compile(net, backend="relax")(x), net(x))
    x = torch.randn(4, 6).softmax(1)
    torch._dynamo.reset()
    fn = lambda x: (x.cumsum(1) * 2).tanh()
    torch.testing.assert_close(torch.compile(fn, backend="relax")(x), fn(x))
import fx2relax
print(fx2relax.stats()["cache_hits"], fx2relax.stats()["nodes_fallback"])
"""


def _run(script: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


@mounts
def test_a_tiny_disk(tmp_path: Path) -> None:
    where = tmp_path / "cache"
    where.mkdir()
    mount = f"mount -t tmpfs -o size=100k none {where}"
    # What is left of it is seen before it is unmounted.
    then = f'"$0" "$@" && find {where} -name "*.tmp"'
    before = ("unshare", "--mount", "sh", "-c", f"{mount} && {then}")
    done = _run(COMPILE, before)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ready", "0", "0"]
    assert done.stderr.count("are not stored in") == 1, done.stderr
    assert "No space left on device" in done.stderr


@mounts
def test_a_read_only_disk(tmp_path: Path) -> None:
    where = tmp_path / "cache"
    assert _run(COMPILE).returncode == 0  # there are programs in it
    mount = f"mount --bind {where} {where} && mount -o remount,ro,bind {where}"
    before = ("unshare", "--mount", "sh", "-c", f'{mount} && "$0" "$@"')
    done = _run(COMPILE, before)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) > 0
    assert done.stderr == ""
    other = COMPILE.replace("Linear(8, 3)", "Linear(8, 2)")
    done = _run(other, before)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("are not stored in") == 1, done.stderr
    assert "Read-only" in done.stderr


@mounts
def test_a_temporary_folder_that_nothing_is_run_from(tmp_path: Path, monkeypatch) -> None:
    where = tmp_path / "temporary"
    where.mkdir()
    monkeypatch.setenv("TMPDIR", str(where))
    mount = f"mount -t tmpfs -o noexec none {where} && cp /bin/true {where} && ! {where}/true"
    before = ("unshare", "--mount", "sh", "-c", f'({mount}) 2>/dev/null && "$0" "$@"')
    for hits in (False, True):
        done = _run(COMPILE, before)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        said = done.stdout.split()
        assert (int(said[1]) > 0, said[2]) == (hits, "0")


WRITE = """
import itertools, os, time
from fx2relax import cache

replace = os.replace

def slowly(*arguments):  # so that a signal comes while a file is being written
    time.sleep(0.005)
    replace(*arguments)

os.replace = slowly
store = cache.open_store(limit=3_000_000)
print("ready", flush=True)
for n in itertools.count():
    key = f"{n % 7}"
    body = bytes([n % 7]) * 700_000
    store.put(key, cache.Entry(body, {"n": n % 7}))
    store.note(key, n=n)
    store.hit(key)
    found = store.get(f"{(n + 3) % 7}")
    assert found is None or set(found.library) == {found.said["n"]}
"""


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


HEADS = [
    b"",
    b"{",
    b"[]",
    b"3",
    b'{"key": "key"}',
    b'{"key": "other", "said": 1}',
    b'{"key": "key", "about": [1], "said": {}}',
    b'{"key": "key", "about": {"kernels": 3, "made": "x", "torch": []}, "said": {}}',
    b"[" * 100_000,
    b"\xff\xfe",
]


@pytest.mark.parametrize("head", HEADS, ids=lambda head: repr(head[:40]))
@pytest.mark.parametrize("length", ["right", "too long", "huge"])
def test_a_head_of_nonsense(store, head: bytes, length: str) -> None:
    """With a digest that is right, as a version to come may write it."""
    count = {"right": len(head), "too long": len(head) + 9, "huge": (1 << 64) - 1}[length]
    body = count.to_bytes(8, "little") + head
    content = cache._MAGIC + hashlib.sha256(body).digest() + body
    path = store._path("key")
    disk.write_own(path, content)
    assert CliRunner().invoke(main, ["cache", "list"]).exit_code == 0
    result = CliRunner().invoke(main, ["cache", "list", "--json"])
    assert result.exit_code == 0, result.output
    found = store.get("key")
    assert found is None or found.library == b""
    assert path.exists() == (found is not None)


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
