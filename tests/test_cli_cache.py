"""`fx2relax cache`: what it lists, and what it removes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import fx2relax
from fx2relax import cache, contents, disk, units
from fx2relax.cli import main


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FX2RELAX_CACHE", "1")
    monkeypatch.setenv("FX2RELAX_CACHE_DIR", str(tmp_path / "cache"))
    fx2relax.reset_stats()
    torch._dynamo.reset()
    return tmp_path / "cache"


def _call(*arguments: str, **given: Any) -> Result:
    return CliRunner().invoke(main, ["cache", *arguments], **given)


def _json(*arguments: str) -> Any:
    result = _call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def _fill(count: int, age: float = 0.0) -> cache.Store:
    store = cache.open_store()
    assert store is not None
    for n in range(count):
        store.put(f"{n}" * 20, cache.Entry(bytes(5000), {}, {"torch": "2.13"}))
        then = time.time() - age * (n + 1)
        os.utime(store._path(f"{n}" * 20), (then, then))
    return store


def test_an_empty_cache(root: Path) -> None:
    assert _call("list").output == "The cache is empty.\n"
    assert _json("list") == {"entries": []}
    assert _json("size")["bytes"] == 0
    assert _call("clear").output == "Removed 0 entries, 0 B.\n"
    assert not root.exists(), "looking makes nothing"


def test_a_compiled_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FX2RELAX_NEVER_SLOWER", "1")
    x = torch.randn(64, 64)
    for _ in range(3):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: (x * 2).softmax(1) + 1, backend="relax")
        for _ in range(8):
            with torch.no_grad():
                compiled(x)
    (entry,) = (e for e in _json("list")["entries"] if e["kind"] == "program")
    assert entry["hits"] == 2
    assert entry["about"] == {
        "fx2relax": fx2relax.__version__,
        "torch": torch.__version__,
        "tvm": entry["about"]["tvm"],
        "library": "torch",
        "operators": 3,
        "kernels": entry["about"]["kernels"],
    }
    assert entry["about"]["kernels"]["tir_kernels"] > 0
    assert set(entry["fastest"].values()) <= {"eager", "torch", "generated"}
    assert entry["fastest"] != {}
    assert 0 <= entry["made"] - time.time() + 60 < 61
    assert entry["problem"] == ""
    shown = _call("list").output
    for text in (entry["name"][:12], "3 operators", torch.__version__, *entry["fastest"].values()):
        assert text in shown
    assert _call("clear", "--yes").exit_code == 0
    torch._dynamo.reset()
    fx2relax.reset_stats()
    torch.compile(lambda x: (x * 2).softmax(1) + 1, backend="relax")(x)
    assert fx2relax.stats()["cache_misses"] == 1


def test_sizes(root: Path) -> None:
    store = _fill(3)
    store.hit("0" * 20)
    store.note("0" * 20, fastest={"()": "eager"})
    files = [p for p in root.rglob("*") if p.is_file() and p.name != ".lock"]
    total = sum(path.stat().st_size for path in files)
    found = _json("size")
    assert found["bytes"] == total
    assert found["kinds"]["program"] == {"entries": 3, "bytes": total}
    assert found["limit"] == 1 << 30
    assert found["folder"] == str(root)
    assert f"3 programs: {units.size_text(total)}" in _call("size").output


def test_clear_asks() -> None:
    store = _fill(2)
    size = units.size_text(sum(item.bytes for item in contents.items()))
    result = _call("clear", input="n\n")
    assert result.exit_code == 1
    assert f"Remove 2 entries ({size})?" in result.stderr
    assert len(contents.items()) == 2
    assert _call("clear", input="y\n").output.endswith(f"Removed 2 entries, {size}.\n")
    assert contents.items() == []
    assert store.get("0" * 20) is None
    assert _call("clear", input="").exit_code == 0, "there is nothing to ask about"


def test_clear_what_was_not_used_for_long() -> None:
    _fill(3, age=86400)  # 1, 2 and 3 days ago
    assert _call("clear", "--older-than", "soon", "--yes").exit_code == 2
    assert _json("clear", "--older-than", "36h", "--yes") == {
        "removed": 2,
        "bytes": 2 * contents.items()[0].bytes,
        "failed": 0,
    }
    assert [item.name[0] for item in contents.items()] == ["0"]
    assert _json("clear", "--older-than", "2d", "--yes")["removed"] == 0


def test_clear_leaves_what_is_at_work_and_takes_what_is_left(root: Path) -> None:
    store = _fill(1)
    store.note("gone", seconds=1)
    names = (".new.tmp", ".old.tmp", "kernel-old.lock", "kernel-new.lock")
    disk.own_folder(disk.native())
    for name in names:
        (disk.native() / name).write_text("")
    (disk.native() / ".folder.tmp").mkdir()
    for path in (store._notes("gone"), *(disk.native() / n for n in (*names, ".folder.tmp"))):
        if "new" not in path.name:
            os.utime(path, (1, 1))
    assert _call("clear", "--yes").exit_code == 0
    left = {path.name for path in root.rglob("*") if path.name != ".lock"}
    assert left == {"programs", "native", ".new.tmp", "kernel-new.lock"}


def test_a_damaged_entry_is_listed(root: Path) -> None:
    store = _fill(2)
    store._path("0" * 20).write_bytes(b"nonsense")
    store._path("1" * 20).chmod(0o666)
    problems = {e["name"][0]: e["problem"] for e in _json("list")["entries"]}
    assert "none of this version's files" in problems["0"]
    assert "others may write" in problems["1"]
    assert "none of this version's" in _call("list").output
    assert _json("clear", "--yes")["removed"] == 2


@pytest.mark.parametrize("command", [["list"], ["size"], ["clear", "--yes"]])
def test_a_folder_of_others_is_left_alone(root: Path, command: list[str]) -> None:
    store = _fill(1)
    store.where.rename(root / "elsewhere")
    store.where.symlink_to("elsewhere")
    result = _call(*command)
    assert result.exit_code == 1
    assert "symbolic link" in result.stderr
    assert len(list((root / "elsewhere").glob("*.program"))) == 1


def test_units() -> None:
    sizes = {0: "0 B", 999: "999 B", 1000: "1.0 KiB", 150_000: "146 KiB", 5 << 30: "5.0 GiB"}
    assert {n: units.size_text(n) for n in sizes} == sizes
    assert units.size_text(None) == "unknown"
    now = time.time()
    ages = {5: "5 s", 120: "2 min", 7300: "2 h", 200_000: "2 d"}
    assert {n: units.age_text(now - n) for n in ages} == ages
    assert units.seconds("2w") == 14 * 86400
    for text in ("", "d", "3", "nand", "infd", "-2h", "3x"):
        with pytest.raises(ValueError, match="no age"):
            units.seconds(text)
