"""A compiled model is called in children of forks, in other processes, and by loaders' workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fresh_process import environment
from process_cases import CASES

_SCRIPT = Path(__file__).with_name("process_cases.py")
#: What the others also show.
_LONG = {"started fork", "started spawn", "started forkserver", "loaded forkserver"}
_LONG |= {"forked with threads", "loaded spawn"}  # where eager hangs, the first takes two minutes
_MARKED = [pytest.param(name, marks=pytest.mark.whole) if name in _LONG else name for name in CASES]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("name", _MARKED)
def test_process(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(_SCRIPT), name],
        env=environment(tmp_path, OMP_NUM_THREADS="2"),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
