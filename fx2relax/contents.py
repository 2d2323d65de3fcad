"""What the cache holds: listed and removed beside processes that use it.

Nothing here loads a program, or makes the folder. A process that loses an entry compiles again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import filelock

from fx2relax import cache, disk

# Files that hold nothing by themselves.
_BESIDE = (cache.NOTES, cache.HITS, cache.SEEN, ".sha256", ".json")


@dataclass(frozen=True)
class Item:
    """One entry.

    Attributes:
        kind: ``"program"``; ``"trace"``, a graph that was traced to one; ``"helper"``, a library
            of this package's; ``"kernel"``, an object compiled of a user's source;
            ``"database"``, what was measured of kernels.
        name: what its file is called, without the ending.
        bytes: what it takes with all that is beside it.
        made: when it was compiled, in seconds since the epoch.
        used: when it was last used.
        hits: how often a program was found and used since; None where that is not counted.
        about: versions, and what a program consists of; empty where it cannot be read.
        fastest: which way the graph runs, by its sizes, as `never_slower` found.
        problem: why it cannot be used; empty where it can.
        files: all of its files.
    """

    kind: str
    name: str
    bytes: int
    made: float
    used: float
    hits: int | None = None
    about: dict[str, Any] = field(default_factory=dict)
    fastest: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    files: tuple[Path, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON can spell it."""
        return {**asdict(self), "files": [str(path) for path in self.files]}


def folders() -> list[Path]:
    """The folders that entries are in, those that there are.

    Raises:
        OSError: one of them is not its owner's alone, so that nothing in it is used.
    """
    places = (cache.folder(), disk.native(), disk.tuned())
    found = [where for where in places if os.path.lexists(where)]
    for where in found:
        disk.check_folder(where)
    return found


def items() -> list[Item]:
    """All entries, those used last first; raises what `folders` raises."""
    found: list[Item] = []
    for where in folders():
        files = dict(disk.entries(where))
        for path, stat in files.items():
            kind = _kind(path)
            if kind is None:
                continue
            beside = [path.with_name(path.stem + ending) for ending in _BESIDE]
            of_it = (path, *(other for other in beside if other in files))
            size = sum(files[each].st_size for each in of_it)
            entry = Item(kind, path.stem, size, stat.st_mtime, stat.st_mtime, files=of_it)
            found.append(_read(entry, files) if kind == "program" else entry)
    return sorted(found, key=lambda item: -item.used)


def _kind(path: Path) -> str | None:
    known = {
        **{cache.SUFFIX: "program", cache.TRACE: "trace"},
        **{".so": "helper", ".o": "kernel", ".jsonl": "database"},
    }
    return None if path.name.startswith(".") else known.get(path.suffix)


def _read(entry: Item, files: dict[Path, os.stat_result]) -> Item:
    path = entry.files[0]
    counted = files.get(path.with_name(entry.name + cache.HITS))
    try:
        about, problem = dict(cache.about(path)), ""
    except (OSError, ValueError) as error:
        about, problem = {}, str(error)
    made = about.pop("made", None)
    return replace(
        entry,
        made=made if isinstance(made, (int, float)) else entry.used,
        hits=counted.st_size if counted is not None else 0,
        about=about,
        fastest=_fastest(path.with_name(entry.name + cache.NOTES)),
        problem=problem,
    )


def _fastest(notes: Path) -> dict[str, str]:
    try:
        found = json.loads(disk.read_own(notes))["fastest"]
        return {str(sizes): str(way) for sizes, way in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def remove(chosen: Iterable[Item]) -> int:
    """Remove entries, and what processes that died have left; returns how many bytes went."""
    gone = 0
    for item in chosen:
        # The notes go last: without its program an entry is none, whatever is beside it.
        for path in item.files:
            with contextlib.suppress(OSError):
                size = path.lstat().st_size
                path.unlink()
                gone += size
    for where in folders():
        disk.sweep(where)
        _sweep_beside(where)
    return gone


def _sweep_beside(where: Path) -> None:
    """Remove what is left beside entries that are gone, but for what is held or new."""
    files = dict(disk.entries(where))
    names = {path.stem for path in files if _kind(path)}
    for path, stat in files.items():
        ending = next((e for e in (*_BESIDE, ".lock") if path.name.endswith(e)), None)
        if ending is None or path.name.startswith(".") or path.name[: -len(ending)] in names:
            continue
        if time.time() - stat.st_mtime < disk.ABANDONED:  # an entry is perhaps being made
            continue
        if ending != ".lock":
            disk.remove([path])
            continue
        with (
            contextlib.suppress(filelock.Timeout, OSError, NotImplementedError),
            filelock.FileLock(path, timeout=0),
        ):
            path.unlink()


def sizes(found: Sequence[Item]) -> dict[str, Any]:
    """How much the cache takes, what it may take, and how much space is left beside it."""
    kinds = {
        kind: {
            "entries": sum(item.kind == kind for item in found),
            "bytes": sum(item.bytes for item in found if item.kind == kind),
        }
        for kind in ("program", "trace", "helper", "kernel", "database")
    }
    return {
        "folder": str(disk.root()),
        "bytes": sum(item.bytes for item in found),
        "limit": cache.size_limit(),
        "free": free_space(),
        "kinds": kinds,
    }


def free_space() -> int | None:
    """The free bytes where the cache is, or would be; None where that cannot be told."""
    for where in (disk.root(), *disk.root().absolute().parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(where).free
    return None
