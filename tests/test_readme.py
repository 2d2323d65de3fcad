"""The Python code of README.md runs as it stands there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pages

README = Path(__file__).parents[1] / "README.md"


def test_python_blocks_run(tmp_path):
    """In one new process: they register converters, build on each other, and import little."""
    assert sum(block.language == "python" for block in pages.blocks(README)) >= 3
    script = tmp_path / "readme.py"
    script.write_text(pages.program(README), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_the_two_commands_and_the_length():
    text = README.read_text(encoding="utf-8")
    assert "    pip install -c constraints.txt -e '.[demo]' && fx2relax demo\n" in text
    assert "    pip install -c constraints.txt -e '.[test]' && pytest\n" in text
    assert len(text.splitlines()) < 150
