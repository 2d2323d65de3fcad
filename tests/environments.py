"""Environments of Python with some of this one's packages, for commands run in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fx2relax

_CLI = "from fx2relax.cli import main; main()"
# What a user may have set, which decides what a command finds.
_SET = ("CC", "CXX", "NVCC", "CUDA_HOME", "PYTHONPATH")


def environment(where: Path, without: Sequence[str] = ()) -> Path:
    """Make an environment of links to this one's packages; returns its interpreter.

    Args:
        where: its folder.
        without: the beginnings of the names that are left out.
    """
    venv.EnvBuilder(symlinks=True).create(where)
    packages = site_packages(where)
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not path.name.lower().startswith(tuple(without)) or not without:
            (packages / path.name).symlink_to(path)
    return where / "bin" / "python"


def site_packages(where: Path) -> Path:
    """Where an environment has its packages."""
    return next(where.glob("lib/python*/site-packages"))


def run(
    *arguments: str, python: Path | str = sys.executable, before: Sequence[str] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    """Run `fx2relax` in a process; a variable that is set to "" is not set in it."""
    given = {k: v for k, v in os.environ.items() if not k.startswith("FX2RELAX_") and k not in _SET}
    given |= {"PYTHONPATH": str(Path(fx2relax.__file__).parent.parent), **env}
    return subprocess.run(
        [*before, str(python), "-c", _CLI, *arguments],
        env={k: v for k, v in given.items() if v},
        capture_output=True,
        text=True,
        timeout=500,
    )


def doctor(**given: Any) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run `fx2relax doctor --json`: its exit code, and its findings by their names."""
    done = run("doctor", "--json", **given)
    assert "Traceback" not in done.stderr + done.stdout, done.stderr
    assert done.stdout.startswith("{"), done.stderr
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    for finding in found.values():
        assert bool(finding["mend"]) == (finding["status"] in ("warning", "broken")), finding
    return done.returncode, found
