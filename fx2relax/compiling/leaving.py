"""The end of a process that is left without unwinding, in the middle of work if need be."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from typing import NoReturn

# Where the user's temporary files are; None before it was looked for.
_users: str | None = None
_folder: str | None = None
# Other threads may still write to the folder.
_TRIES = 20


def keep_together() -> None:
    """Let this process make its temporary files in a folder that `leave` removes."""
    global _users, _folder
    _folder = None
    with contextlib.suppress(OSError):  # without room for files, what needs them says so
        _users = _users or tempfile.gettempdir()
        _folder = tempfile.mkdtemp(prefix="fx2relax-", dir=_users)
    tempfile.tempdir = _folder or _users


def leave(code: int) -> NoReturn:
    """End the process, and remove its temporary files."""
    for _ in range(_TRIES):
        if _folder is None or not os.path.lexists(_folder):
            break
        shutil.rmtree(_folder, ignore_errors=True)
    os._exit(code)
