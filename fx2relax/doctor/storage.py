"""The cache and the temporary folder: whose they are, whether they can be written, what is free."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import tempfile
from pathlib import Path

from fx2relax import cache, contents, disk
from fx2relax.doctor.findings import Finding
from fx2relax.doctor.running import Probed
from fx2relax.units import size_text

_LITTLE = 200 << 20


def check(probed: Probed) -> list[Finding]:
    """The folders, what they hold, and the space that is left."""
    if not cache.enabled(True):
        text = "is switched off: programs are compiled in every process"
        return [Finding.warning("cache", text, "unset FX2RELAX_CACHE"), _temporary()]
    found = [_folder(where) for where in (cache.folder(), disk.native())]
    if all(finding.status == "ok" for finding in found):
        found += [_holds(), _space()]
    return [*found, _temporary()]


def _folder(where: Path) -> Finding:
    """Whether a folder can be used, tried by a file that is gone afterwards."""
    name = where.name
    try:
        disk.own_folder(where)
        trial = where / f".doctor-{os.getpid()}"
        try:
            disk.write_own(trial, b"?" * 4096)
        finally:
            disk.remove([trial])
    except disk.NotOwn as error:
        return Finding.warning(name, f"is not used: {error}", _reclaim(where))
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = "the disk is full" if full else str(error)
        mend = "fx2relax cache clear" if full and where.exists() else _elsewhere()
        return Finding.warning(name, f"cannot be written to: {why}", mend, folder=str(where))
    found = where.stat()
    mode = f"{found.st_mode & 0o777:o}"
    text = f"{where}, yours, mode {mode}, can be written to"
    return Finding.ok(name, text, folder=str(where), owner=found.st_uid, mode=mode)


def _reclaim(where: Path) -> str:
    """The command that makes a folder its owner's alone, where the owner can."""
    found = where.lstat()
    real = not where.is_symlink() and where.is_dir()
    if real and found.st_uid == os.geteuid() and found.st_mode & 0o022:
        return f"chmod go-w {shlex.quote(str(where))}"
    return _elsewhere()


def _elsewhere() -> str:
    """The command that puts the cache where this user can write."""
    own = f"fx2relax-{os.geteuid()}" if os.name == "posix" else "fx2relax"
    with contextlib.suppress(OSError):
        for parent in (os.path.expanduser("~"), tempfile.gettempdir()):
            if _takes_programs(parent):
                return f"export FX2RELAX_CACHE_DIR={shlex.quote(str(Path(parent) / own))}"
    return "export FX2RELAX_CACHE_DIR=/a/folder/of/yours"


def other_temporary() -> str:
    """The command that chooses another temporary folder."""
    for where in ("/tmp", "/var/tmp", "/dev/shm", os.path.expanduser("~")):
        if _takes_programs(where) and shutil.disk_usage(where).free > _LITTLE:
            return f"export TMPDIR={shlex.quote(where)}"
    return "export TMPDIR=/a/folder/of/yours"


def _takes_programs(where: str) -> bool:
    """Whether files can be written to a folder, and run from it."""
    return Path(where).is_absolute() and os.access(where, os.W_OK | os.X_OK) and not _noexec(where)


def _noexec(where: str) -> bool:
    if not hasattr(os, "statvfs"):
        return False
    return bool(os.statvfs(where).f_flag & getattr(os, "ST_NOEXEC", 0))


def _holds() -> Finding:
    items = contents.items()
    sizes = contents.sizes(items)
    programs = sizes["kinds"]["program"]
    text = (
        f"{programs['entries']} programs, {size_text(programs['bytes'])} of "
        f"{size_text(sizes['limit'])}; in all {size_text(sizes['bytes'])}"
    )
    damaged = [item for item in items if item.problem]
    if damaged:
        text = f"{text}; {len(damaged)} cannot be read: {damaged[0].problem}"
        return Finding.warning("entries", text, "fx2relax cache clear", **sizes)
    return Finding.ok("entries", text, **sizes)


def _space() -> Finding:
    free = contents.free_space()
    if free is not None and free < _LITTLE:
        text = f"{size_text(free)} are left"
        return Finding.warning("free space", text, "fx2relax cache clear", free=free)
    return Finding.ok("free space", size_text(free), free=free)


def _temporary() -> Finding:
    """Compiled code passes through it on its way into the process."""
    name = "temporary folder"
    try:
        where = tempfile.gettempdir()
        with tempfile.NamedTemporaryFile(dir=where) as file:
            file.write(b"?" * 4096)
    except OSError as error:
        mend = other_temporary()
        return Finding.broken(name, f"cannot be written to: {error}", mend)
    given = os.environ.get("TMPDIR", "")
    if given and Path(given).resolve() != Path(where).resolve():  # Python has tried it
        text = f"$TMPDIR is {given}, which cannot be written to; {where} is used"
        return Finding.warning(name, text, "unset TMPDIR", folder=where)
    free = shutil.disk_usage(where).free
    if _noexec(where):
        text = f"{where} is mounted noexec: compiled code is loaded from the cache's folder"
        return Finding.warning(name, text, other_temporary(), folder=where)
    if free < _LITTLE:
        text = f"{where} has {size_text(free)} left"
        return Finding.warning(name, text, other_temporary(), folder=where)
    return Finding.ok(name, f"{where}, {size_text(free)} free", folder=where, free=free)
