"""The command that starts a second interpreter like this one."""

from __future__ import annotations

import subprocess
import sys


def command(code: str, *arguments: str) -> list[str]:
    """What runs code in an interpreter of its own, with this one's flags and paths.

    Args:
        code: statements; `sys` is imported already.
        arguments: `sys.argv[1:]` there.
    """
    # What this one was started with, such as -S and -I, holds for the other one, too.
    flags: list[str] = getattr(subprocess, "_args_from_interpreter_flags", list)()
    end = 1 + len(arguments)
    paths = f"import sys; sys.path[:] = sys.argv[{end}:]; del sys.argv[{end}:]; "
    return [sys.executable, *flags, "-c", paths + code, *arguments, *sys.path]
