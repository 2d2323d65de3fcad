"""Scripts in processes of their own, with the settings that a user finds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import fx2relax
from fx2relax import disk
from fx2relax.runtime import native


def give_helper(store: Path) -> None:
    """Put what is compiled once on a machine, which takes seconds, into a cache folder."""
    native.use()
    where = store / disk.native().name
    disk.own_folder(where)
    for path in disk.native().glob("*-*"):
        if path.suffix in (".so", ".sha256"):
            shutil.copy2(path, where)


def environment(store: Path, *, helper: bool = True, **switches: str) -> dict[str, str]:
    """This process's, with no settings of ours but a cache folder and those given.

    Args:
        store: the folder.
        helper: whether what is compiled once on a machine is put there.
        switches: settings.
    """
    if helper:
        give_helper(store)
    root = Path(fx2relax.__file__).parent.parent
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FX2RELAX_")}
    paths = [str(root), *filter(None, [kept.get("PYTHONPATH")])]
    return {
        **kept,
        "FX2RELAX_CACHE_DIR": str(store),
        "PYTHONPATH": os.pathsep.join(paths),
        **switches,
    }


def run(
    script: str,
    store: Path,
    *arguments: str,
    compile_process: bool = True,
    helper: bool = True,
) -> str:
    """The last line that a script prints in a process whose programs are kept in a folder."""
    switches = {} if compile_process else {"FX2RELAX_COMPILE_PROCESS": "0"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        env=environment(store, helper=helper, **switches),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
