"""How much memory there is, as the system says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fx2relax.runtime import heap


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose files stand in for the system's."""
    monkeypatch.setattr(heap, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(heap, "_GROUP", tmp_path)
    return tmp_path


def test_half_of_what_is_available(system: Path) -> None:
    (system / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:    2000 kB\nCached: 1 kB\n")
    assert heap.leaves_room_for(1000 << 10)
    assert not heap.leaves_room_for((1000 << 10) + 1)


def test_a_container_has_less(system: Path) -> None:
    (system / "meminfo").write_text("MemAvailable:    2000 kB\n")
    (system / "memory.max").write_text("5000\n")
    (system / "memory.current").write_text("4000\n")
    assert heap.leaves_room_for(500)
    assert not heap.leaves_room_for(501)
    (system / "memory.stat").write_text("active_file 7\ninactive_file 2000\n")
    assert heap.leaves_room_for(1500)
    assert not heap.leaves_room_for(1501)
    (system / "memory.max").write_text("max\n")
    assert heap.leaves_room_for(1000 << 10)


def test_nobody_says(system: Path) -> None:
    assert heap.leaves_room_for(1 << 60)


def test_this_machine() -> None:
    assert heap.leaves_room_for(0)
    assert heap.leaves_room_for(1 << 20)
