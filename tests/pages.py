"""Pages in Markdown whose code runs: the blocks of one page in order, in one namespace.

The language of a block says what becomes of it:

- ``python`` runs. One that begins with ``# raises NAME`` has to raise an exception of that very
  class. One that begins with ``# model.py`` is the file of this name, and does not run by itself.
- ``text`` is what the block above it prints, or what its exception says. ``...`` is anything.
- ``console`` has commands behind ``$``, which run, and what they print. ``; echo $?`` adds the exit
  code.
- ``sh`` and ``cpp`` are shown, and do not run.

A page runs in a process of its own, forked from one that has imported PyTorch and TVM.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import traceback
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import switches as switches

RUN = ("python", "console")
LANGUAGES = (*RUN, "text", "sh", "cpp")
_SECONDS = 600
_FILE = re.compile(r"# (\w+\.py)\n")
_RAISES = re.compile(r"# raises ([\w.]+)\n")
_EXIT_CODE = "; echo $?"
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "tvm.relax", "fx2relax.backend", "fx2relax.converters", "fx2relax.pipeline.building"]
)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: the first word behind the fence; a directive of the site's is in braces.
        text: its lines.
        line: the number of its first line on the page.
    """

    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found, fence, start, language = [], "", 0, ""
    lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        ticks = re.match(r"`{3,}", line)
        if not fence and ticks:
            fence, start = ticks[0], number + 1
            language = (line.strip()[len(fence) :].split() or [""])[0]
        elif fence and line.strip() == fence:
            found.append(Block(language, "".join(lines[start - 1 : number - 1]), start))
            fence = ""
    assert not fence, f"{page.name}:{start - 1}: a block that does not end"
    return found


def program(page: Path) -> str:
    """The Python of a page, every line in its place."""
    text = ""
    for block in blocks(page):
        if block.language == "python" and not _FILE.match(block.text):
            text += "\n" * (block.line - 1 - text.count("\n")) + block.text
    return text


def check(page: Path, folder: Path) -> None:
    """Run a page in a process of its own, and raise AssertionError where it is wrong.

    Args:
        page: the page.
        folder: where it runs; a page that deletes or writes files does so there.
    """
    report = folder / "report.txt"
    process = _context.Process(target=_child, args=(page, folder, report))
    process.start()
    process.join(_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"{page.name} did not end within {_SECONDS} s")
    told = report.read_text(encoding="utf-8") if report.exists() else "it left no report"
    assert process.exitcode == 0, f"{page.name} ended with {process.exitcode}\n{told}"


def _child(page: Path, folder: Path, report: Path) -> None:
    with report.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 2)
        os.chdir(folder)
        warnings.simplefilter("error")
        try:
            failures = run(page)
        except BaseException:
            failures = [traceback.format_exc()]
        file.write("\n".join(failures))
    sys.exit(1 if failures else 0)


def run(page: Path) -> list[str]:
    """Run a page here, in the current folder; returns what was not as the page says."""
    source = Path(f"{page.stem}.page.py").absolute()
    source.write_text(program(page), encoding="utf-8")
    sys.path.insert(0, os.getcwd())
    module = types.ModuleType("__main__")
    module.__file__ = str(source)
    sys.modules["__main__"] = module
    failures = []
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for block, expected in _with_results(page):
            begun = out.tell()
            if block.language == "console":
                failures += _console(block, out)
                continue
            said = _python(block, module, source)
            actual = out.getvalue()[begun:] if said is None else said
            if expected is not None:
                failures += _difference(expected, actual)
    return [f"{page.name}:{failure}" for failure in failures]


def _with_results(page: Path) -> Iterator[tuple[Block, Block | None]]:
    found = blocks(page)
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block.language in RUN:
            yield block, after if after is not None and after.language == "text" else None


def _python(block: Block, module: types.ModuleType, source: Path) -> str | None:
    """Run a block; returns what its exception says, if it has to raise one."""
    named = _FILE.match(block.text)
    if named is not None:
        Path(named[1]).write_text(block.text, encoding="utf-8")
        return None
    code = compile("\n" * (block.line - 1) + block.text, str(source), "exec", dont_inherit=True)
    raises = _RAISES.match(block.text)
    if raises is None:
        exec(code, module.__dict__)
        return None
    try:
        exec(code, module.__dict__)
    except Exception as error:
        wanted: Any = eval(raises[1], module.__dict__)
        if type(error) is not wanted:
            raise
        return str(error)
    raise AssertionError(f"line {block.line} raised no {raises[1]}")


def _console(block: Block, out: io.StringIO) -> list[str]:
    """Run each command of a block, and compare what it prints with the lines below it."""
    failures = []
    lines = block.text.splitlines()
    starts = [n for n, line in enumerate(lines) if line.startswith("$ ")]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        expected = Block("text", "\n".join(lines[start + 1 : end]), block.line + start + 1)
        command = lines[start][2:]
        code, said = _command(command.removesuffix(_EXIT_CODE), out)
        if command.endswith(_EXIT_CODE):
            said += f"{code}\n"
        elif code:
            failures.append(f"{block.line + start}: `{command}` ended with {code}:\n{said}")
        failures += _difference(expected, said)
    return failures


def _command(command: str, out: io.StringIO) -> tuple[int, str]:
    """Run a command; returns its exit code and what it says. Ours need no process of their own."""
    words = shlex.split(command)
    if words[0] != "fx2relax" or set(command) & set("|>;&*"):
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        done = subprocess.run(
            command,
            shell=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PATH": path},
            timeout=_SECONDS,
        )
        return done.returncode, done.stdout
    from fx2relax.cli import main

    begun = out.tell()
    code: Any = 0
    with contextlib.redirect_stderr(out):
        try:
            main(words[1:], prog_name="fx2relax")
        except SystemExit as end:
            code = end.code
    return int(code or 0), out.getvalue()[begun:]


def _difference(expected: Block, actual: str) -> list[str]:
    """What differs between a block and what was said, trailing blanks aside."""
    parts = [re.escape(part) for part in _stripped(expected.text).split("...")]
    if re.fullmatch(".*?".join(parts), _stripped(actual), re.DOTALL):
        return []
    return [f"{expected.line}: expected\n{expected.text}\n  got\n{actual}"]


def _stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
