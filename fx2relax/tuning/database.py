"""What was measured of kernels: a file of JSON lines for each target, to add to, share and ship.

A line is written whole, under a lock; what a process that died wrote of one is passed over, with
a warning. A line is data, a measured schedule, and is checked when it is applied: no code is taken
from there.

Lines, by what they hold:

- ``{"kernel": key, "name": ..., "tir": ...}``: the kernel, as text for readers;
- ``{"kernel": key, "digest": ..., "ratio": ..., "own": ..., "accepted": ..., "how": ...}``: a
  schedule, its seconds over those of our rules', the latter's, and whether it is clearly faster
  (`how` is left out where it is far slower);
- ``{"kernel": key, "digest": ..., "failed": ...}``: one that cannot be used, and why;
- ``{"kernel": key, "digest": ..., "revoked": true}``: one that was accepted, and was not faster
  when it was timed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock

from fx2relax import disk
from fx2relax._version import __version__
from fx2relax.compat import tvm
from fx2relax.pipeline.target import described

log = logging.getLogger("fx2relax")
SUFFIX = ".jsonl"


@dataclass
class Known:
    """What is known of one kernel.

    Attributes:
        name: what a module called it.
        tir: the kernel as TVMScript, for readers.
        tried: the digests of all schedules that were measured, or failed.
        failed: how many failed.
        measured: the records that say how they are done, by digest.
        revoked: the digests of those that were accepted by chance.
    """

    name: str = ""
    tir: str = ""
    tried: set[str] = field(default_factory=set)
    failed: int = 0
    measured: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    revoked: set[str] = field(default_factory=set)

    def ranked(self) -> list[Mapping[str, Any]]:
        """The records, the fastest first."""
        return sorted(self.measured.values(), key=lambda record: float(record["ratio"]))

    @property
    def best(self) -> Mapping[str, Any] | None:
        """The fastest one that is clearly faster than our rules; None where none is."""
        for record in self.ranked():
            if record.get("accepted") is True and record["digest"] not in self.revoked:
                return record
        return None


def folder(given: str | os.PathLike[str] | None = None) -> Path:
    """Where databases are: a folder of the user's, or one in the cache of this package."""
    return Path(given).expanduser() if given else disk.tuned()


class Database:
    """The file of one target.

    Args:
        target: a `tvm.target.Target`; the processor and the number of threads are part of it.
        given: a folder; see `folder`.

    Raises:
        OSError: the folder cannot be made, or is the cache's and others could write to it.
    """

    def __init__(self, target: Any, given: str | os.PathLike[str] | None = None) -> None:
        self.where = folder(given)
        self._own = not given
        if self._own:
            disk.root().mkdir(parents=True, exist_ok=True)
            disk.own_folder(self.where)
        else:
            self.where.mkdir(parents=True, exist_ok=True)
        self.path = self.where / f"{_name(target)}{SUFFIX}"

    def add(self, record: Mapping[str, Any]) -> None:
        """Write a line; an OSError where it cannot be written."""
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        with self._lock():
            descriptor = os.open(self.path, flags, 0o600 if self._own else 0o666)
            try:
                end = os.lseek(descriptor, 0, os.SEEK_END)
                if end and os.pread(descriptor, 1, end - 1) != b"\n":
                    line = b"\n" + line  # whoever wrote the last one died
                written = 0
                while written < len(line):
                    written += os.write(descriptor, line[written:])
            finally:
                os.close(descriptor)

    def read(self) -> dict[str, Known]:
        """All that is known, by the kernels' keys; empty where there is no file."""
        found: dict[str, Known] = {}
        for record in self._lines():
            key, digest = record.get("kernel"), record.get("digest")
            if not isinstance(key, str):
                continue
            known = found.setdefault(key, Known())
            if isinstance(record.get("tir"), str):
                known.name, known.tir = str(record.get("name", "")), record["tir"]
            if not isinstance(digest, str):
                continue
            known.tried.add(digest)
            failed = "failed" in record
            known.failed += failed
            if failed or record.get("revoked") is True:
                known.revoked.add(digest)
            elif isinstance(record.get("how"), dict) and _is_number(record.get("ratio")):
                known.measured[digest] = record
        return found

    def state(self) -> str:
        """A digest of all that is known: empty where there is nothing."""
        content = self._content()
        return hashlib.sha256(content).hexdigest()[:16] if content else ""

    def _content(self) -> bytes:
        with contextlib.suppress(FileNotFoundError):
            try:
                return disk.read_own(self.path) if self._own else self.path.read_bytes()
            except OSError as error:
                if isinstance(error, FileNotFoundError):
                    raise
                log.warning("what was tuned is not used: %s: %s", self.path, error)
        return b""

    def _lines(self) -> list[dict[str, Any]]:
        content = self._content()
        found, damaged = _records(content)
        if damaged and not content.endswith(b"\n"):  # which somebody may be writing
            with contextlib.suppress(OSError, filelock.Timeout), self._lock():
                found, damaged = _records(self._content())
        if damaged and self.path not in _told:
            _told.add(self.path)
            lines = "1 line" if damaged == 1 else f"{damaged} lines"
            log.warning("%s of %s cannot be read, and the rest is used", lines, self.path)
        return found

    def _lock(self) -> Any:
        return filelock.FileLock(self.path.with_suffix(".lock"))


#: Files whose damage was told of.
_told: set[Path] = set()


def _records(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """The lines that are dicts, and how many are none."""
    found, damaged = [], 0
    for line in content.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            found.append(record)
        else:
            damaged += 1
    return found, damaged


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _name(target: Any) -> str:
    """A file's name for a target and for what compiles for it."""
    config, _ = described(target)
    said = {"target": config, "tvm": tvm.__version__, "fx2relax": __version__}
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:12]
    words = (config.get("mcpu", config["kind"]), f"{config.get('num-cores', 1)}t", digest)
    return re.sub(r"[^\w.-]", "-", "-".join(str(word) for word in words))
