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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fx2relax import disk
from fx2relax.switches import is_on

log = logging.getLogger("fx2relax")
_MAGIC = b"fx2relax program 1\n"
_DIGEST = hashlib.sha256().digest_size
SUFFIX = ".program"
TRACE = ".trace"
NOTES = ".notes.json"
HITS = ".hits"
SEEN = ".seen"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_DEFAULT_SIZE = 1 << 30


@dataclass(frozen=True)
class Entry:
    """A program as it is stored.

    Attributes:
        library: the bytes of a shared library.
        said: what the runtime has to know.
        about: what a user may want to know: versions, and what the program consists of.
    """

    library: bytes
    said: Any
    about: Mapping[str, Any] = field(default_factory=dict)


def enabled(option: bool) -> bool:
    """Whether programs are stored: unless the option or FX2RELAX_CACHE=0 forbids it."""
    return option and is_on("FX2RELAX_CACHE")


def folder() -> Path:
    """Where programs are kept: in $FX2RELAX_CACHE_DIR, or in the user's cache of this package."""
    return disk.root() / "programs"


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
        disk.own_folder(where)

    def has(self, key: str) -> bool:
        """Whether there is a program of that key."""
        return self._path(key).is_file()

    def get(self, key: str, ending: str = SUFFIX) -> Entry | None:
        """The program of a key, or None. A damaged one is removed, with a warning.

        Args:
            key: its name.
            ending: of its file: `TRACE` where it is no program but a graph that was traced.
        """
        path = self._path(key, ending)
        try:
            entry = _unpacked(disk.read_own(path), key)
        except (disk.NotOwn, ValueError) as error:
            self.drop(key, str(error), ending)
            return None
        except OSError:
            return None
        disk.used(path)
        return entry

    def put(self, key: str, entry: Entry, ending: str = SUFFIX) -> None:
        """Store a program; one that is larger than all of them may be is not stored.

        Where it cannot be stored, a warning says so once for a process. For `ending` see `get`.
        """
        packed = _packed(entry, key)
        if len(packed) > self.limit:
            return
        try:
            disk.write_own(self._path(key, ending), packed)
        except OSError as error:
            disk.warn_unusable(error)
            return
        disk.bound(self.where, self.limit, _counts)

    def drop(self, key: str, why: str, ending: str = SUFFIX) -> None:
        """Remove a program that cannot be used, and say so; for `ending` see `get`."""
        path = self._path(key, ending)
        what = "program %s is compiled" if ending == SUFFIX else "trace %s is made"
        log.warning(f"the stored {what} again: %s", path, why)
        disk.remove([path])

    def hit(self, key: str) -> None:
        """Count that a program was found and used: a byte each, which two processes can add."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        with contextlib.suppress(OSError):
            descriptor = os.open(self.where / f"{key}{HITS}", flags, 0o600)
            try:
                os.write(descriptor, b".")
            finally:
                os.close(descriptor)

    def is_new(self, graph: str) -> bool:
        """Whether a graph, of which this is a digest, was not asked for before; it is now."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        try:
            os.close(os.open(self.where / f"{graph}{SEEN}", flags, 0o600))
        except FileExistsError:
            return False
        except OSError:
            return True
        return True

    def notes(self, key: str) -> dict[str, Any]:
        """What was measured of a program: see `note`."""
        try:
            found = _json(disk.read_own(self._notes(key)))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def note(self, key: str, **notes: Any) -> None:
        """Keep a few numbers beside a program."""
        text = json.dumps({**self.notes(key), **notes})
        disk.write_own(self._notes(key), text.encode())

    def _path(self, key: str, ending: str = SUFFIX) -> Path:
        return self.where / f"{key}{ending}"

    def _notes(self, key: str) -> Path:
        return self.where / f"{key}{NOTES}"


def _counts(path: Path) -> bool:
    return path.name.endswith((SUFFIX, TRACE, NOTES, HITS, SEEN))


def _packed(entry: Entry, key: str) -> bytes:
    said = json.dumps({"key": key, "about": entry.about, "said": entry.said}).encode()
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
    found = _json(body[8:end])
    if not isinstance(found, dict) or found.get("key") != key:
        raise ValueError("it is the program of another graph")
    return Entry(body[end:], found.get("said"), _about(found))


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except RecursionError:  # which is no ValueError
        raise ValueError("it is nested too deeply") from None


def _about(found: Any) -> Mapping[str, Any]:
    given = found.get("about") if isinstance(found, dict) else None
    return given if isinstance(given, dict) else {}


def about(path: Path) -> Mapping[str, Any]:
    """What a user may want to know of a stored program, from the beginning of its file.

    Raises:
        ValueError: it is none of this version's files.
        OSError: it cannot be read, or somebody else could have written it.
    """
    start = len(_MAGIC) + _DIGEST + 8
    head = disk.read_own(path, start)
    if not head.startswith(_MAGIC) or len(head) < start:
        raise ValueError("it is none of this version's files")
    end = start + min(int.from_bytes(head[-8:], "little"), path.stat().st_size)
    return _about(_json(disk.read_own(path, end)[start:]))


def open_store(option: bool = True, limit: int | None = None) -> Store | None:
    """The store of this process's settings; None where there is none, with one warning."""
    if not enabled(option):
        return None
    try:
        return Store(folder(), size_limit(limit))
    except OSError as error:
        disk.warn_unusable(error)
        return None
