"""The tables, once as data, for the terminal (rich) and for a Markdown file."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from benchmarks.figures import Figure, geometric_mean, parts, ratio, sides, summary, title
from benchmarks.results import Cell, Group, Results
from benchmarks.sides import OURS, split


@dataclass
class Table:
    """A heading, rows of text, and a line on how to read them."""

    heading: str
    columns: list[str]
    rows: list[list[str]]
    caption: str
    notes: list[str] = field(default_factory=list)


class _Notes:
    """Reasons, each once, with numbers to refer to them by."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def mark(self, text: str) -> str:
        return f"[{self.found.setdefault(text, len(self.found) + 1)}]"

    @property
    def lines(self) -> list[str]:
        return [f"[{number}] {text}" for text, number in self.found.items()]


def _milliseconds(ms: float) -> str:
    return f"{ms:.3g}" if ms < 100 else f"{ms:.0f}"


def _latency(group: Group, side: str, notes: _Notes) -> str:
    cell = group.cells.get(side)
    if cell is None:
        return ""
    if cell.status == "missing":
        return f"- {notes.mark(f'{side}: {cell.reason}')}"
    if cell.status != "ok" or cell.ms is None:
        return f"{cell.status} {notes.mark(f'{side}: {cell.reason}')}"
    text = _milliseconds(cell.ms)
    times = ratio(group, side) if side != OURS else None
    if times is not None:
        text += f" ({times:.2f}x)"
    if cell.notes.get("fallbacks"):
        given = ", ".join(cell.notes["fallbacks"][:8])
        text += " " + notes.mark(f"{side}: runs in PyTorch: {given}")
    return text


def _spread(group: Group) -> str:
    """The largest interquartile range of the sides' rounds, over the median."""
    found = []
    for cell in group.cells.values():
        if cell.status == "ok" and len(cell.rounds) >= 4:
            low, middle, high = statistics.quantiles(cell.rounds, n=4)
            found.append((high - low) / middle)
    return f"{max(found):.0%}" if found else ""


def _latencies(results: Results) -> list[Table]:
    columns = sides(results)
    tables = []
    for mode, kind, groups in parts(results):
        notes = _Notes()
        rows = [
            [g.case, str(g.batch), str(g.threads)]
            + [_latency(g, side, notes) for side in columns]
            + [_spread(g)]
            for g in groups
        ]
        caption = f"ms of a call, median of rounds; in brackets how many times faster {OURS} is; "
        caption += "the widest interquartile range of the row's sides"
        heading = f"Latency: {title(mode, kind)}"
        shown = [kind if kind != "overhead" else "kernel", "batch", "threads", *columns, "spread"]
        tables.append(Table(heading, shown, rows, caption, notes.lines))
    return tables


def _by_side(
    results: Results, heading: str, caption: str, show: Callable[[Group, str, Cell], str]
) -> Table | None:
    """A row for each network's group, a column for each side."""
    columns = sides(results)
    groups = [g for g in results.groups if g.kind == "network"]
    rows = []
    for group in groups:
        cells = [(side, group.cells.get(side)) for side in columns]
        shown = [show(group, side, c) if c is not None and c.memory else "" for side, c in cells]
        rows.append([group.mode, group.case, str(group.batch), str(group.threads), *shown])
    if not rows:
        return None
    return Table(heading, ["mode", "network", "batch", "threads", *columns], rows, caption)


def _compile_seconds(group: Group, side: str, cell: Cell) -> str:
    return " / ".join("-" if s is None else f"{s:.1f}" for s in (cell.cold_s, cell.warm_s))


def _memory(results: Results) -> Callable[[Group, str, Cell], str]:
    def show(group: Group, side: str, cell: Cell) -> str:
        kept = cell.memory
        if "peak" not in kept or "held" not in kept:
            return ""
        first = f"{kept['cold_peak']:.0f}" if "cold_peak" in kept else "-"
        text = f"{first} / {kept['peak']:.0f} / {kept['held']:.0f}"
        # Of small weights the rest of the process would drown the figure.
        if kept["weights"] >= 20 and side in results.first_use:
            own = kept["held"] - results.first_use[side]["held"]
            text += f" ({own / kept['weights']:.1f}w)"
        return text

    return show


def tables(results: Results) -> list[Table]:
    """All of them: latencies by mode and kind, compile seconds, memory."""
    found: list[Table | None] = [
        *_latencies(results),
        _by_side(
            results,
            "Compile time",
            "seconds to the end of the first call: with empty caches / in a second process",
            _compile_seconds,
        ),
        _by_side(
            results,
            "Memory",
            "MB: resident at most in a process with empty caches / in a second one / held by that "
            "after the calls, without files; in brackets what is held beyond the side's hold for a "
            "trivial program, in copies of the weights",
            _memory(results),
        ),
    ]
    return [table for table in found if table is not None]


def _mark(figure: Figure) -> str:
    return "" if figure.met is None else "yes" if figure.met else "no"


def _summary(results: Results) -> Table:
    rows = [[f.what, f.value, f.goal, _mark(f)] for f in summary(results)]
    seconds = {side: use["seconds"] for side, use in results.first_use.items() if side != "eager"}
    first = ", ".join(f"{side} {s:.1f} s" for side, s in seconds.items())
    notes = [f"A side's first program on this machine: {first}"] if first else []
    return Table("Summary", ["figure", "value", "goal", "met"], rows, "", notes)


def where(results: Results) -> list[str]:
    """The run's machine and command, in lines."""
    e = results.environment
    command = re.sub(r" --(out \S+|resume)", "", e["command"])  # the files tell nobody anything
    versions = ", ".join(f"{name} {version}" for name, version in e["versions"].items())
    return [
        f"{e['date']}, `{command}` at {e['revision']}",
        f"{e['processor']}, {e['cores']} cores, {e['memory_gb']} GB; {e['system']}",
        f"Python {e['python']}, {versions}",
    ]


def show(results: Results, console: Console) -> None:
    """Print all tables."""
    for table in [*tables(results), _summary(results)]:
        rich = RichTable(title=table.heading, caption=table.caption or None)
        for i, column in enumerate(table.columns):
            left = i == 0 or table.heading == "Summary"
            rich.add_column(column, justify="left" if left else "right", overflow="fold")
        for row in table.rows:
            rich.add_row(*(escape(text) for text in row))
        console.print(rich)
        for note in table.notes:
            console.print(escape(note), style="dim")
    for line in where(results):
        console.print(escape(line))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def ratios(results: Results) -> Table | None:
    """How many times faster ours is than each side: a row a network, its batch sizes in one cell.

    Of the most threads that the run has; None where no network was timed.
    """
    groups = [g for g in results.groups if (g.mode, g.kind) == ("inference", "network")]
    if not groups:
        return None
    threads = max(group.threads for group in groups)
    groups = [group for group in groups if group.threads == threads]
    others = [side for side in sides(results) if split(side)[0] != OURS]
    rows = []
    for case in dict.fromkeys(group.case for group in groups):
        of_case = sorted((g for g in groups if g.case == case), key=lambda g: g.batch)
        cells = []
        for side in others:
            found = [ratio(group, side) for group in of_case]
            cells.append(" / ".join("-" if r is None else f"{r:.2f}" for r in found))
        batches = " / ".join(str(group.batch) for group in of_case)
        rows.append([case, batches, *cells])
    means = [[r for g in groups if (r := ratio(g, side)) is not None] for side in others]
    rows.append(["geometric mean", "", *(f"{geometric_mean(m):.2f}" if m else "-" for m in means)])
    caption = f"times faster than each, {threads} thread{'s' if threads > 1 else ''}"
    return Table("In short", ["network", "batch", *others], rows, caption)


def in_markdown(
    results: Results, level: int = 2, suffix: str = "", only: tuple[str, ...] = ()
) -> list[str]:
    """The tables as lines of Markdown.

    Args:
        results: a run's.
        level: of the headings; none where it is 0.
        suffix: what each heading ends with.
        only: how the headings begin of the tables that are wanted; all, where it is empty.
    """
    short = ratios(results)
    lines: list[str] = []
    for table in [_summary(results), *([short] if short else []), *tables(results)]:
        if only and not table.heading.startswith(only):
            continue
        lines += [f"{'#' * level} {table.heading}{suffix}", ""] if level else []
        lines += [_row(table.columns), _row(["---"] * len(table.columns))]
        lines += [_row(row) for row in table.rows]
        lines += ["", table.caption, ""] if table.caption else [""]
        lines += [f"{note}  " for note in table.notes] + [""] * bool(table.notes)
    return lines


def markdown(results: Results) -> str:
    """The same as a Markdown document, with the plots that `plots.draw` writes beside it."""
    from benchmarks.plots import names

    lines = ["# Benchmarks", "", *(f"{line}  " for line in where(results)), ""]
    lines += in_markdown(results)
    lines += [f"![{name}]({name}.png)\n" for name in names(results)]
    return "\n".join(lines).rstrip() + "\n"
