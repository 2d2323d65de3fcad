"""Compiled programs on disk: a folder of files named by what they were compiled from.

A file is written whole or not at all, and is checked against its digest before any of it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import platformdirs

log = logging.getLogger("fx2relax")
_MAGIC = b"fx2relax program 1\n"
_DIGEST = hashlib.sha256().digest_size
_SUFFIX = ".program"
_NOTES = ".notes.json"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_DEFAULT_SIZE = 1 << 30
# A file that a process began to write and did not finish.
_ABANDONED_SECONDS = 3600


@dataclass(frozen=True)
class Entry:
    """A program as it is stored: a shared library, and what the runtime has to know."""

    library: bytes
    said: Any


def enabled(option: bool) -> bool:
    """Whether programs are stored: unless the option or FX2RELAX_CACHE=0 forbids it."""
    return option and os.environ.get("FX2RELAX_CACHE", "1").lower() not in ("0", "off", "false")


def folder() -> Path:
    """$FX2RELAX_CACHE_DIR, or the user's cache of this package."""
    given = os.environ.get("FX2RELAX_CACHE_DIR")
    return (Path(given) if given else platformdirs.user_cache_path("fx2relax")) / "programs"


def size_limit(option: int | None = None) -> int:
    """How many bytes the programs may take: the option, $FX2RELAX_CACHE_SIZE (``512M``), 1 GiB."""
    if option is not None:
        return option
    given = os.environ.get("FX2RELAX_CACHE_SIZE", "").strip()
    if not given:
        return _DEFAULT_SIZE
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", given, re.IGNORECASE)
    if match is None:
        log.warning("FX2RELAX_CACHE_SIZE=%r is no size such as 512M; 1G is used", given)
        return _DEFAULT_SIZE
    return int(match[1]) * _UNITS[match[2].upper()]


class Store:
    """The stored programs of a folder.

    Args:
        where: the folder, made where it is missing, for its owner alone.
        limit: how many bytes the programs may take; the ones used longest ago go first.

    Raises:
        OSError: the folder cannot be made, or others could write to it.
    """

    def __init__(self, where: Path, limit: int) -> None:
        self.where, self.limit = where, limit
        where.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            where.mkdir(mode=0o700)
        _refuse_shared(where)

    def get(self, key: str) -> Entry | None:
        """The program of a key, or None. A damaged one is removed, with a warning."""
        path = self._path(key)
        try:
            found = path.read_bytes()
        except OSError:
            return None
        try:
            entry = _unpacked(found, key)
        except ValueError as error:
            self.drop(key, str(error))
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # what was used last is kept longest
        return entry

    def put(self, key: str, entry: Entry) -> None:
        """Store a program; one that is larger than all of them may be is not stored."""
        packed = _packed(entry, key)
        if len(packed) > self.limit:
            return
        self._write(self._path(key), packed)
        self._bound()

    def drop(self, key: str, why: str) -> None:
        """Remove a program that cannot be used, and say so."""
        path = self._path(key)
        log.warning("the stored program %s is compiled again: %s", path, why)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    def notes(self, key: str) -> dict[str, Any]:
        """What was measured of a program: see `note`."""
        try:
            found = json.loads(self._notes(key).read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def note(self, key: str, **notes: Any) -> None:
        """Keep a few numbers beside a program."""
        text = json.dumps({**self.notes(key), **notes})
        self._write(self._notes(key), text.encode())

    def _path(self, key: str) -> Path:
        return self.where / f"{key}{_SUFFIX}"

    def _notes(self, key: str) -> Path:
        return self.where / f"{key}{_NOTES}"

    def _write(self, path: Path, content: bytes) -> None:
        descriptor, name = tempfile.mkstemp(dir=self.where, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            os.replace(name, path)  # another process may be writing the same
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _bound(self) -> None:
        """Remove what was used longest ago, unless another process is at it."""
        lock = filelock.FileLock(self.where / ".lock", timeout=0)
        with contextlib.suppress(filelock.Timeout, OSError), lock:
            files = []
            for path in self.where.iterdir():
                with contextlib.suppress(OSError):  # gone since
                    found = path.stat()
                    if path.suffix == ".tmp" and time.time() - found.st_mtime > _ABANDONED_SECONDS:
                        path.unlink()
                    elif path.suffix == _SUFFIX or path.name.endswith(_NOTES):
                        files.append((found.st_mtime, found.st_size, path))
            total = sum(size for _, size, _ in files)
            for _, size, path in sorted(files):
                if total <= self.limit:
                    break
                with contextlib.suppress(OSError):
                    path.unlink()
                total -= size


def _refuse_shared(where: Path) -> None:
    """What others can write to is not run: a program is machine code."""
    if os.name != "posix":
        return
    found = where.stat()
    if found.st_uid != os.geteuid():
        raise OSError(f"{where} belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"others may write to {where}")


def _packed(entry: Entry, key: str) -> bytes:
    said = json.dumps({"key": key, "said": entry.said}).encode()
    body = len(said).to_bytes(8, "little") + said + entry.library
    return _MAGIC + hashlib.sha256(body).digest() + body


def _unpacked(content: bytes, key: str) -> Entry:
    start = len(_MAGIC) + _DIGEST
    if not content.startswith(_MAGIC):
        raise ValueError("it is none of this version's files")
    body = content[start:]
    if hashlib.sha256(body).digest() != content[len(_MAGIC) : start]:
        raise ValueError("its content does not match its digest")
    end = 8 + int.from_bytes(body[:8], "little")
    found = json.loads(body[8:end])
    if found["key"] != key:
        raise ValueError("it is the program of another graph")
    return Entry(body[end:], found["said"])


_refused: set[str] = set()


def open_store(option: bool = True, limit: int | None = None) -> Store | None:
    """The store of this process's settings; None where there is none, with one warning."""
    if not enabled(option):
        return None
    where = folder()
    try:
        return Store(where, size_limit(limit))
    except OSError as error:
        if str(error) not in _refused:
            _refused.add(str(error))
            log.warning("compiled programs are not stored: %s", error)
        return None
