"""What a sweep found, as tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .check import Outcome
from .rows import DTYPES


def show(outcomes: Sequence[Outcome], console: Console | None = None) -> None:
    """Print counts per dtype, what ran in PyTorch in float32, and every failure."""
    console = console or Console(width=160)
    for outcome in outcomes:
        if outcome.failures:
            row = f"{outcome.op} {outcome.dtype} {outcome.manner}"
            console.print(
                f"FAILED: {row} {outcome.passed}/{outcome.tried}", style="red", markup=False
            )
            for failure in outcome.failures[:2]:
                console.print("    " + " ".join(failure.split())[:600], markup=False)
        if outcome.upstream:
            text = " ".join(outcome.upstream[0].split())[:300]
            row = f"{outcome.op} {outcome.dtype} {outcome.manner}, {len(outcome.upstream)} samples"
            console.print(f"PyTorch's own, as under aot_eager: {row}", style="dim", markup=False)
            console.print("    " + text, style="dim", markup=False)
    _show_calls(outcomes, console)
    console.print(_counts(outcomes))


def _counts(outcomes: Sequence[Outcome]) -> Table:
    table = Table(title="operators and samples that give what eager gives")
    for column in ("dtype", "manner", "operators", "samples", "no torch call", "seconds"):
        table.add_column(column, justify="left" if column in ("dtype", "manner") else "right")
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.manner, outcome.dtype].append(outcome)
    names = list(DTYPES)
    for (manner, dtype), rows in sorted(groups.items(), key=lambda g: names.index(g[0][1])):
        rows = [r for r in rows if r.tried]
        whole = sum(not r.failures for r in rows)
        alone = sum(not runs_in_pytorch(r) for r in rows)
        table.add_row(
            dtype,
            manner,
            f"{whole}/{len(rows)}",
            f"{sum(r.passed for r in rows)}/{sum(r.tried for r in rows)}",
            f"{100 * alone / max(len(rows), 1):.1f}%",
            f"{sum(r.seconds for r in rows):.0f}",
        )
    return table


def runs_in_pytorch(outcome: Outcome) -> bool:
    """Whether any sample needed PyTorch while the compiled function ran."""
    return bool(outcome.torch_calls or outcome.breaks)


def _show_calls(outcomes: Sequence[Outcome], console: Console) -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.dtype == "float32" and outcome.manner == "forward":
            for why in [*outcome.torch_calls, *outcome.breaks]:
                found[why].append(outcome.op)
    if not found:
        return
    table = Table(title="float32 operators that run in PyTorch")
    table.add_column("torch call, or why the graph breaks")
    table.add_column("operators")
    for why, ops in sorted(found.items(), key=lambda item: -len(item[1])):
        table.add_row(why, ", ".join(sorted(set(ops))))
    console.print(table)
