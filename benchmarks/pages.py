"""Put the tables of runs into pages that hold prose, too.

``python -m benchmarks.pages full=FOLDER train=OTHER docs/benchmarks.md README.md`` fills the blocks
of these runs, and leaves the rest of a page and other runs' blocks as they are. A block stands
between two comments, and the first says what is in it:

    <!-- run full level=3 suffix=", training" tables="Summary;Latency" sides=eager,relax -->
    <!-- end -->

All but the name may be left out: ``level`` of the headings (0: none), a ``suffix`` for them, the
``tables`` by the beginnings of their headings, the ``sides`` that are shown, ``plots``, the folder
beside the page to draw in, and ``where=no``, which leaves out the machine and the command.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import click

from benchmarks.plots import draw
from benchmarks.results import Results
from benchmarks.tables import in_markdown, where

_BLOCK = re.compile(r"(<!-- run (?P<settings>.*?) -->\n).*?(<!-- end -->)", re.DOTALL)
_KEYS = {"level", "suffix", "tables", "sides", "plots", "where"}


def fill(text: str, runs: Mapping[str, Results], folder: Path) -> str:
    """The page with the blocks of these runs filled.

    Args:
        text: the page.
        runs: results by the names that blocks use.
        folder: the page's, below which plots are drawn.

    Raises:
        ValueError: a block has a setting that there is not.
    """

    def block(found: re.Match[str]) -> str:
        name, *settings = shlex.split(found["settings"])
        given = dict(setting.partition("=")[::2] for setting in settings)
        if unknown := given.keys() - _KEYS:
            raise ValueError(f"a block of {name!r} has the settings {', '.join(sorted(unknown))}")
        if name not in runs:
            return found[0]
        return found[1] + _shown(runs[name], given, folder) + found[3]

    return _BLOCK.sub(block, text)


def _shown(results: Results, given: Mapping[str, str], folder: Path) -> str:
    if "sides" in given:
        results = _of(results, given["sides"].split(","))
    lines = [] if given.get("where") == "no" else [*(f"{line}  " for line in where(results)), ""]
    only = tuple(filter(None, given.get("tables", "").split(";")))
    level, suffix = int(given.get("level", 2)), given.get("suffix", "")
    lines += in_markdown(results, level, suffix, only)
    if plots := given.get("plots"):
        lines += [f"![{f.stem}]({plots}/{f.name})\n" for f in draw(results, folder / plots)]
    return "\n".join(lines).rstrip() + "\n"


def _of(results: Results, sides: list[str]) -> Results:
    groups = [
        dataclasses.replace(g, cells={s: c for s, c in g.cells.items() if s in sides})
        for g in results.groups
    ]
    return dataclasses.replace(results, groups=groups)


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("arguments", nargs=-1, required=True, metavar="NAME=FOLDER... PAGE...")
def main(arguments: tuple[str, ...]) -> None:
    named = [argument.partition("=") for argument in arguments if "=" in argument]
    pages = [Path(argument) for argument in arguments if "=" not in argument]
    try:
        runs = {name: Results.load(Path(folder) / "results.json") for name, _, folder in named}
        for page in pages:
            text = fill(page.read_text(encoding="utf-8"), runs, page.parent)
            page.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
