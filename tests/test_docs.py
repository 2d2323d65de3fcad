"""The pages of docs/: their code runs, they build without a warning, and they leave nothing out."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pages
import pytest

import fx2relax
from fx2relax import cli, deploy, errors, extern, pipeline, testing
from fx2relax.doctor.switches import KNOWN
from fx2relax.options import Options

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
#: Pages that need a package which is not installed with the others.
NEEDS = {"quantised": "torchao"}


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


# -- the code of the pages ------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.stem)
def test_blocks_are_marked(path):
    found = [block for block in pages.blocks(path) if not block.language.startswith("{")]
    before = ""
    for block in found:
        assert block.language in pages.LANGUAGES, f"line {block.line}: {block.language!r}"
        if block.language == "text":
            assert before == "python", f"line {block.line}: what says this?"
        before = block.language


@pytest.mark.parametrize(
    "path",
    [path for path in DOCS if any(b.language in pages.RUN for b in pages.blocks(path))],
    ids=lambda path: path.stem,
)
def test_runs(path, tmp_path):
    needed = NEEDS.get(path.stem)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}")
    pages.check(path, tmp_path)


PROBES = {
    "a wrong result": ("```python\nprint(1 + 1)\n```\n```text\n3\n```\n", "expected\n3"),
    "no exception": ("```python\n# raises ValueError\nint('3')\n```\n", "raised no ValueError"),
    "another exception": ("```python\n# raises KeyError\nint('x')\n```\n", "ValueError: invalid"),
    "an exception": ("\n```python\n1 / 0\n```\n", "ZeroDivisionError"),
    "a warning": ("```python\nimport warnings\nwarnings.warn('no')\n```\n", "UserWarning: no"),
    "a wrong exit code": ("```console\n$ fx2relax nothing\n```\n", "ended with 2"),
    "a wrong line": ("```console\n$ echo one\ntwo\n```\n", "expected\ntwo"),
}


@pytest.mark.parametrize("name", PROBES)
def test_what_is_wrong_is_found(name, tmp_path):
    text, said = PROBES[name]
    path = tmp_path / "probe.md"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(AssertionError, match=re.escape(said)):
        pages.check(path, tmp_path)


def test_what_is_right_passes(tmp_path):
    path = tmp_path / "probe.md"
    path.write_text(
        "```python\n# tool.py\nprint('from a file')\n```\n"
        "```python\nx = 2\n```\n"
        "```python\nprint(x, 'and', id(x))\n```\n```text\n2 and ...\n```\n"
        "```python\n# raises ZeroDivisionError\nx / 0\n```\n```text\ndivision by zero\n```\n"
        "```console\n$ python tool.py\nfrom a file\n$ fx2relax nothing; echo $?\n...\n2\n```\n",
        encoding="utf-8",
    )
    pages.check(path, tmp_path)


def commands(path: Path) -> list[str]:
    """Every line of a page's blocks that begins with our command."""
    lines = [
        line.removeprefix("$ ").removesuffix("; echo $?")
        for block in pages.blocks(path)
        if block.language in ("console", "sh")
        for line in block.text.splitlines()
    ]
    return [part for line in lines for part in line.split(" && ") if part.startswith("fx2relax ")]


@pytest.mark.parametrize(
    "command", sorted({command for path in DOCS for command in commands(path)})
)
def test_commands_are_as_they_are_written(command):
    """Options and subcommands exist, though not every command is run."""
    words = shlex.split(command)[1:]
    if words == ["--version"]:
        return
    found: Any = cli.main
    name: str | None = "fx2relax"
    context = None
    while isinstance(found, click.Group):
        context = click.Context(found, info_name=name, parent=context)
        name, found, words = found.resolve_command(context, words)
    found.make_context(name, words, parent=context)


# -- what the pages have to name ------------------------------------------------------------------


def rows(text: str) -> set[str]:
    """The first column of the tables, where it is one name in backquotes."""
    return set(re.findall(r"^\| `(\w+)` \|", text, re.M))


def test_every_option_has_a_row():
    assert {f.name for f in fields(Options)} - {"mode"} <= rows(page("options"))
    assert "## `mode`" in page("options")


def test_defaults_are_the_options_own():
    found = re.findall(r"^\| `(\w+)` \| `([^`]+)` \(default\)", page("options"), re.M)
    assert len(found) >= 4
    for name, value in found:
        assert ast.literal_eval(value) == getattr(Options(), name)


def test_limits_are_those_of_the_readme():
    """Its names at least; the words are others."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## Limits")[2].partition("\nMore: ")[0]
    names = set(re.findall(r"`[^`]+`", section))
    assert len(names) >= 5
    assert names <= set(re.findall(r"`[^`]+`", page("limits")))


def test_every_switch_has_a_row():
    named = {name for name in rows(page("options")) if name.startswith("FX2RELAX_")}
    assert named == set(KNOWN)


def exceptions() -> list[type[Exception]]:
    found = {errors.Fx2RelaxError, pipeline.SharedWeightsError}
    found |= set(errors.Fx2RelaxError.__subclasses__())
    for known in list(found):
        found |= set(known.__subclasses__())
    return sorted(
        (e for e in found if e.__module__.startswith("fx2relax")), key=lambda e: e.__name__
    )


@pytest.mark.parametrize("error", exceptions(), ids=lambda e: e.__name__)
def test_every_error_has_a_section(error):
    """With what it means, and what mends it."""
    title = f"## `{error.__name__}`\n"
    assert title in page("errors")
    section = page("errors").partition(title)[2].partition("\n## ")[0]
    if error not in (errors.Fx2RelaxError, errors.Refused):
        assert "**Means" in section
        assert "**Remedy:**" in section
    if error is not errors.Fx2RelaxError:
        assert "# raises " in section or "print(" in section
    assert f"{error.__name__}\n" in page("api")


def test_every_artifact_of_the_logs_has_a_row():
    from fx2relax import logs

    assert set(logs.ARTIFACTS) <= rows(page("seeing-inside"))


def test_every_subcommand_is_named():
    written = " ".join(page(path.stem) for path in DOCS)
    for name in cli.main.commands:
        assert f"fx2relax {name}" in written


def test_every_public_name_is_in_the_reference():
    reference = set(re.findall(r"^\.\. (?:auto|py:)\w+:: ([\w.]+)", page("api"), re.M))
    named = {name.rpartition(".")[2] for name in reference}
    modules = {"deploy", "extern", "pipeline", "testing"}
    assert set(fx2relax.__all__) - modules - {"__version__"} <= named


# -- docstrings -----------------------------------------------------------------------------------


def public() -> dict[str, Any]:
    """Public functions, classes, and the methods of these, by name."""
    places = {"fx2relax": fx2relax, "extern": extern, "testing": testing}
    found = {f"{p}.{n}": getattr(m, n) for p, m in places.items() for n in m.__all__}
    found["deploy.link"] = deploy.link
    for name in ("build", "lower", "assemble", "census", "lift_weights", "merge_transforms"):
        found[f"pipeline.{name}"] = getattr(pipeline, name)
    for name, value in list(found.items()):
        if inspect.isclass(value) and not issubclass(value, Exception):
            for method, function in vars(value).items():
                if inspect.isfunction(function) and not method.startswith("_"):
                    found[f"{name}.{method}"] = function
    return {n: v for n, v in found.items() if inspect.isfunction(v)}


@pytest.mark.parametrize("name", public())
def test_docstrings_say_all(name):
    """Each parameter has a line, and so has what is returned."""
    function = public()[name]
    text = inspect.getdoc(function) or ""
    signature = inspect.signature(function)
    named = [p for p in signature.parameters if p != "self"]
    arguments = re.search(r"^Args:\n((?: .*\n?|\n)*)", text, re.M)
    said = re.findall(r"^ {4}(\w+):", arguments[1], re.M) if arguments else []
    one_line = len(text.splitlines()) == 1 and all(f"`{p}`" in text or p in text for p in named)
    assert said == named or one_line, f"its parameters are {named}, it names {said}"
    returns = str(signature.return_annotation)
    nothing = ("None", "Iterator[None]", "<class 'inspect._empty'>")
    if returns not in nothing and len(text.splitlines()) > 3:
        assert re.search(r"^Returns:$", text, re.M) or "Returns " in text, "what does it return?"


# -- the build ------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="needs the extra `docs`")
def test_builds_without_a_warning(tmp_path):
    built = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html"]
    done = subprocess.run(
        [*command, "-d", str(tmp_path / "trees"), str(ROOT / "docs"), str(built)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    for path in DOCS:
        assert (built / f"{path.stem}.html").is_file()
    reference = (built / "api.html").read_text(encoding="utf-8")
    for name in ("fx2relax.from_fx", "fx2relax.export", "fx2relax.extern.source"):
        assert f'id="{name}"' in reference
