"""What `fx2relax ops` prints: the table of the core operators, and its summary."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from fx2relax import decompositions
from fx2relax.coverage import ROUTES, Row, measure

_MEANING = {
    "converter": "Relax operators, or kernels of its own",
    "decomposition": "PyTorch's, into operators that have converters",
    "constant": "computed once, when the graph is imported",
}
_GOOD = ("yes", "-")


def measured(targets: Sequence[Any], bar: Progress) -> list[Row]:
    """Measure overloads, with a progress bar."""
    table = decompositions.table()
    with bar:
        return [measure(target, table) for target in bar.track(targets, description="importing")]


def as_json(rows: Sequence[Row]) -> str:
    """Every row with all that was measured, as a JSON list."""
    return json.dumps([row.as_dict() for row in rows], indent=1)


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the table, what could not be imported, and a line of totals."""
    if not console.is_terminal:
        console = Console(file=console.file, width=160)
    console.print(table(rows))
    for row in rows:
        for what, error in row.errors.items():
            line = next(iter(error.splitlines()), "")
            console.print(f"{row.name}, {what}: {line}", style="red", markup=False)
    counts = [f"{route} {n}" for route in ROUTES if (n := _count(rows, route))]
    total = f"{len(rows)} core operators of torch {_version()}"
    console.print(f"{total}: {', '.join(counts)}", highlight=False)


def table(rows: Sequence[Row]) -> Table:
    """One line for each row."""
    out = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        caption="@name is a TIR kernel. dtypes: of those that eager takes on CPU, what is compiled",
        caption_justify="left",
    )
    for name in ("operator", "route", "consists of", "dtypes", "dynamic", "gradient"):
        # In a narrow terminal only names are folded.
        out.add_column(name, overflow="fold", no_wrap=name in ("route", "dynamic", "gradient"))
    for row in rows:
        good = row.route != "torch call" or bool(row.reason)
        cells = [row.name, row.route, _uses(row), _dtypes(row), row.dynamic, row.gradient]
        styles = ["" if good else "red", *[""] * 3, _style(row.dynamic), _style(row.gradient)]
        out.add_row(*[Text(cell, style) for cell, style in zip(cells, styles, strict=True)])
    return out


def summary(rows: Sequence[Row]) -> str:
    """The totals of all core operators as a Markdown table, which docs/operators.md carries."""
    lines = [
        f"| {len(rows)} core ATen operators of torch {_version()} | | |",
        "| --- | --- | --- |",
    ]
    for route in ROUTES:
        if count := _count(rows, route):
            lines.append(f"| {route} | {count} | {_MEANING.get(route) or _torch_calls(rows)} |")
    sized = [row for row in rows if row.route != "torch call" and row.dynamic != "-"]
    lines.append(_but("symbolic sizes", sized, [r for r in sized if r.dynamic != "yes"]))
    derived = [row for row in rows if row.gradient != "-"]
    lines.append(_but("gradients", derived, [r for r in derived if r.gradient != "yes"]))
    typed = [row for row in rows if row.route != "torch call"]
    lines.append(f"| dtypes that run in PyTorch | | {_dtypes_in_torch(typed)} |")
    return "\n".join(lines)


def _count(rows: Iterable[Row], route: str) -> int:
    return sum(row.route == route for row in rows)


def _torch_calls(rows: Sequence[Row]) -> str:
    """The operators that run in PyTorch, grouped by the reason."""
    grouped: dict[str, list[str]] = {}
    for row in rows:
        if row.route == "torch call":
            grouped.setdefault(row.reason or "no converter", []).append(row.name)
    return "; ".join(f"{why}: {_names(names)}" for why, names in grouped.items())


def _dtypes_in_torch(rows: Sequence[Row]) -> str:
    """``complex64 (100 operators)``, or ``none``."""
    counts = Counter(dtype for row in rows for dtype, good in row.dtypes.items() if not good)
    return (
        ", ".join(f"{dtype} ({n} operator{'s' * (n > 1)})" for dtype, n in counts.items()) or "none"
    )


def _but(what: str, rows: Sequence[Row], failing: Sequence[Row]) -> str:
    """A line of the summary: in how many rows something is compiled, and where it is not."""
    names = f"of {len(rows)}; not {_names([r.name for r in failing])}" if failing else "all"
    return f"| {what} | {len(rows) - len(failing)} | {names} |"


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _uses(row: Row) -> str:
    parts = [*row.relax, *(f"@{kernel}" for kernel in row.kernels)]
    return ", ".join([*parts, *(f"torch: {name}" for name in row.torch)]) or "-"


def _dtypes(row: Row) -> str:
    missing = [dtype for dtype, good in row.dtypes.items() if not good]
    if not row.dtypes:
        return ""
    if not missing:
        return "all"
    return "none" if len(missing) == len(row.dtypes) else f"not {', '.join(missing)}"


def _style(answer: str) -> str:
    return "" if answer in _GOOD else "yellow"


def _version() -> str:
    return ".".join(torch.__version__.split(".")[:2])
