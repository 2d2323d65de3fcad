"""The cache runs nothing that its owner did not build, and survives what happens to it."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from cache_cases import COMPILE, ENTRY, run
from cache_cases import own_cache as own_cache
from cache_cases import store as store
from click.testing import CliRunner

from fx2relax import cache, disk
from fx2relax.cli import main
from fx2relax.runtime import compiled

ROOT = os.name == "posix" and os.geteuid() == 0
as_root = pytest.mark.skipif(not ROOT, reason="only root gives files away")


def _mounts() -> bool:
    if not ROOT or not shutil.which("unshare"):
        return False
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(command, capture_output=True).returncode == 0


mounts = pytest.mark.skipif(not _mounts(), reason="takes the right to mount")


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
    from fx2relax import drafts, programs

    monkeypatch.setattr(drafts, "load", _full)
    monkeypatch.setattr(programs, "restore", lambda *arguments: None)
    monkeypatch.setattr(programs, "Sizes", lambda graph: type("", (), {"hold": lambda *a: True})())
    monkeypatch.setattr(programs.Calling, "read", lambda said: None)
    store.put(
        "key",
        cache.Entry(
            b"", {"guards": None, "imported": {}, "calling": 0, "census": {}, "kernels": []}
        ),
    )
    graph = torch.fx.symbolic_trace(torch.nn.Identity())
    assert programs._restored(store, "key", graph, []) is None
    assert store.get("key") is not None


@mounts
def test_a_tiny_disk(tmp_path: Path) -> None:
    where = tmp_path / "cache"
    where.mkdir()
    mount = f"mount -t tmpfs -o size=100k none {where}"
    # What is left of it is seen before it is unmounted.
    then = f'"$0" "$@" && find {where} -name "*.tmp"'
    before = ("unshare", "--mount", "sh", "-c", f"{mount} && {then}")
    done = run(COMPILE, before)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ready", "0", "0"]
    assert done.stderr.count("are not stored in") == 1, done.stderr
    assert "No space left on device" in done.stderr


@mounts
def test_a_read_only_disk(tmp_path: Path) -> None:
    where = tmp_path / "cache"
    assert run(COMPILE).returncode == 0  # there are programs in it
    mount = f"mount --bind {where} {where} && mount -o remount,ro,bind {where}"
    before = ("unshare", "--mount", "sh", "-c", f'{mount} && "$0" "$@"')
    done = run(COMPILE, before)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) > 0
    assert done.stderr == ""
    other = COMPILE.replace("Linear(8, 3)", "Linear(8, 2)")
    done = run(other, before)
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
        done = run(COMPILE, before)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        said = done.stdout.split()
        assert (int(said[1]) > 0, said[2]) == (hits, "0")


@mounts
def test_folders_that_nothing_is_run_from(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "temporary").mkdir()
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setenv("FX2RELAX_NATIVE", "0")
    mounted = [
        f"mount -t tmpfs -o noexec none {tmp_path / part}" for part in ("temporary", "cache")
    ]
    done = run(COMPILE, ("unshare", "--mount", "sh", "-c", " && ".join([*mounted, '"$0" "$@"'])))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ready", "0", "0"]  # compiled all the same
    assert done.stderr.count("cannot be loaded") == 1, done.stderr


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


@mounts
def test_a_tiny_temporary_folder(tmp_path: Path) -> None:
    """LLVM would end the process where it cannot write an object file."""
    where = tmp_path / "temporary"
    where.mkdir()
    mount = f"mount -t tmpfs -o size=64k none {where}"
    before = ("unshare", "--mount", "sh", "-c", f'{mount} && TMPDIR={where} "$0" "$@"')
    done = run(COMPILE, before)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ready", "0", "0"]
    assert done.stderr.count("No space left but") == 1, done.stderr
    assert "programs are not stored" in done.stderr
