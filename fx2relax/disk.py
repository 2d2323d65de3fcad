"""Folders and files of this package's cache: their owner's alone, written whole, bounded in size.

What lies there is run as machine code. So nothing is read that somebody else could have put there,
or led us to; and a process that dies at any moment leaves whole files, or ones that are swept away.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import filelock
import platformdirs

log = logging.getLogger("fx2relax")
#: Files and folders that a process began to write have this ending.
UNFINISHED = ".tmp"
#: After as many seconds the process that began to write it is taken to have died.
ABANDONED = 3600
_POSIX = os.name == "posix"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NotOwn(OSError):
    """What somebody else may have put there."""


def root() -> Path:
    """$FX2RELAX_CACHE_DIR, or the user's cache of this package."""
    given = os.environ.get("FX2RELAX_CACHE_DIR")
    return Path(os.path.expanduser(given) if given else platformdirs.user_cache_path("fx2relax"))


def native() -> Path:
    """Where libraries and objects that a C or C++ compiler made are kept."""
    return root() / "native"


def tuned() -> Path:
    """Where what was measured of kernels is kept."""
    return root() / "tuning"


def own_folder(where: Path) -> None:
    """Make a folder for its owner alone, or see that it is.

    Raises:
        NotOwn: it is a link, or others own it, can write to it, or have put a link on the way.
        OSError: it cannot be made.
    """
    if str(where).startswith("~"):
        raise FileNotFoundError("there is no home folder to put it in")
    where.parent.mkdir(parents=True, exist_ok=True)
    try:
        where.mkdir(mode=0o700)
    except OSError:
        if not os.path.lexists(where):
            raise
    check_folder(where)


def check_folder(where: Path) -> None:
    """See that a folder is its owner's alone; raises what `own_folder` raises."""
    found = where.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise NotOwn(f"{where} is a symbolic link")
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{where} is no folder")
    _refuse_others(found, where)
    if not _POSIX:
        return
    for part in where.absolute().parents:  # who may make a link may lead it to files of ours
        on_the_way = part.lstat()
        if stat.S_ISLNK(on_the_way.st_mode) and on_the_way.st_uid not in (0, os.geteuid()):
            raise NotOwn(f"{part}, on the way to {where}, is a link of another user")


def read_own(path: Path, size: int = -1) -> bytes:
    """The content of a file that only its owner, who runs this process, could have written.

    Args:
        path: the file.
        size: how many bytes of it, from its beginning; all when left out.

    Raises:
        NotOwn: it is a link, no file, somebody else's, or open to others.
        OSError: it cannot be read.
    """
    # Neither is a link followed, nor does a pipe that somebody has put there hold us up.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags | getattr(os, "O_BINARY", 0))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotOwn(f"{path} is a symbolic link") from None
        raise
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise NotOwn(f"{path} is no regular file")
        _refuse_others(found, path)
        return file.read(size)


def _refuse_others(found: os.stat_result, path: Path) -> None:
    if not _POSIX:
        return
    if found.st_uid != os.geteuid():
        raise NotOwn(f"{path} belongs to another user")
    if found.st_mode & _OTHERS_WRITE:
        raise NotOwn(f"others may write to {path}")


def write_own(path: Path, content: bytes) -> None:
    """Write a file whole, or leave what was there; another process may be writing the same.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=UNFINISHED)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


@contextlib.contextmanager
def own_workshop(where: Path) -> Iterator[Path]:
    """A folder inside another, to make files in that are then moved; it is gone afterwards."""
    made = Path(tempfile.mkdtemp(dir=where, prefix=".", suffix=UNFINISHED))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def entries(where: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """What is in a folder, and is not gone before it is looked at; nothing where it is missing."""
    with contextlib.suppress(OSError):
        for path in where.iterdir():
            with contextlib.suppress(OSError):
                yield path, path.lstat()


def sweep(where: Path) -> None:
    """Remove what processes that died have begun to write."""
    for path, found in entries(where):
        if path.suffix == UNFINISHED and time.time() - found.st_mtime > ABANDONED:
            if stat.S_ISDIR(found.st_mode):
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()


def bound(where: Path, limit: int, counts: Callable[[Path], bool]) -> None:
    """Let the files of a folder take no more than a limit: what was used longest ago goes first.

    Nothing is done while another process is at it.

    Args:
        where: the folder.
        limit: how many bytes.
        counts: which of its files may be removed.
    """
    lock = filelock.FileLock(where / ".lock", timeout=0)
    with contextlib.suppress(filelock.Timeout, OSError, NotImplementedError), lock:
        sweep(where)
        files = [(s.st_mtime, s.st_size, path) for path, s in entries(where) if counts(path)]
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= limit:
                break
            remove([path])
            total -= size


def remove(paths: Iterable[Path]) -> None:
    """Remove files; one that is gone already is none to speak of."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()


def used(path: Path) -> None:
    """Say of a file that it was used now: what was used last is kept longest."""
    with contextlib.suppress(OSError):
        os.utime(path)


_told: set[Path] = set()


def warn_unusable(error: Exception) -> None:
    """Say once for each folder that what is compiled is not kept, and why."""
    where = root()
    if where not in _told:
        _told.add(where)
        log.warning(
            "compiled programs are not stored in %s: %s (`fx2relax doctor` says what to do)",
            where,
            error,
        )
