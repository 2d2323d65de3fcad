"""Every operator of PyTorch's `op_db` that `torch.onnx` exports, in float32, against ONNX.

    python tests/sweep_onnx.py --out onnx.jsonl

Our import of each sample is compared with eager, with ONNX's reference evaluator and with TVM's
ONNX importer. Differences of the other two are explained in `onnx_differences.py`. Rows that the
file holds already are not run again; ``--report`` reads it alone.
"""

from __future__ import annotations

import fnmatch
import json
import random
from collections.abc import Sequence
from pathlib import Path

import click
from onnx_differences import unexplained
from opinfo.onnx import SIDES, OnnxOutcome, onnx_rows, run_onnx
from opinfo.rows import Row
from rich.console import Console
from rich.table import Table
from workers import each


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), default=Path("onnx.jsonl"))
@click.option("--op", "patterns", multiple=True, help="Operators, as shell patterns.")
@click.option("--samples", default=2, show_default=True, help="Samples of an operator, about.")
@click.option("--torchscript", is_flag=True, help="Let TorchScript's exporter try the rest.")
@click.option("--workers", default=2, show_default=True)
@click.option("--seconds", default=120.0, show_default=True, help="Time that one row may take.")
@click.option("--report", "only_report", is_flag=True, help="Run nothing.")
def main(
    out: Path,
    patterns: tuple[str, ...],
    samples: int,
    torchscript: bool,
    workers: int,
    seconds: float,
    only_report: bool,
) -> None:
    outcomes = _read(out)
    if not only_report:
        ran = {o.op for o in outcomes}
        todo = [
            row
            for row in onnx_rows()
            if row.op not in ran
            and (not patterns or any(fnmatch.fnmatchcase(row.op, p) for p in patterns))
        ]
        # Slow operators lie together in `op_db`.
        random.Random(0).shuffle(todo)
        with out.open("a") as file:

            def done(outcome: OnnxOutcome) -> None:
                file.write(json.dumps(outcome.as_dict()) + "\n")
                file.flush()
                outcomes.append(outcome)

            exporter = None if torchscript else "dynamo"
            pieces = [(row, samples, exporter) for row in todo]
            each(run_onnx, pieces, _failed, done, title="rows", workers=workers, seconds=seconds)
    bad = show(outcomes)
    raise SystemExit(1 if bad else 0)


def _failed(piece: tuple[Row, int, str | None], why: str) -> OnnxOutcome:
    return OnnxOutcome(piece[0].op, failure=why)


def _read(out: Path) -> list[OnnxOutcome]:
    if not out.exists():
        return []
    return [OnnxOutcome.of(json.loads(line)) for line in out.read_text().splitlines()]


def show(outcomes: Sequence[OnnxOutcome], console: Console | None = None) -> int:
    """Print the counts and each operator that is ours to mend or not explained; how many."""
    console = console or Console(width=160)
    bad = 0
    for outcome in sorted(outcomes, key=lambda o: o.op):
        lines = unexplained(outcome)
        bad += bool(lines)
        for line in lines:
            console.print(
                f"{outcome.op}: {' '.join(line.split())[:500]}", style="red", markup=False
            )
        if outcome.failure:
            console.print(f"{outcome.op}: {outcome.failure}", style="dim", markup=False)
    console.print(_counts(outcomes))
    return bad


def _counts(outcomes: Sequence[OnnxOutcome]) -> Table:
    found = [f for o in outcomes for f in o.found]
    table = Table(title="ONNX as the second opinion, float32")
    for column in ("", "operators", "samples"):
        table.add_column(column, justify="right" if column else "left")

    def row(name: str, operators: int, samples: int) -> None:
        table.add_row(name, str(operators), str(samples))

    row("tried", len(outcomes), len(found))
    row("no result: crashed or too slow", sum(bool(o.failure) for o in outcomes), 0)
    row("exportable", sum(o.exportable for o in outcomes), sum(bool(f.exporter) for f in found))
    row("compared", sum(o.compared for o in outcomes), sum(f.compared for f in found))
    for side in SIDES:
        ran = [f for f in found if not getattr(f, side).startswith("cannot")]
        operators = {o.op for o in outcomes if any(f in ran for f in o.found)}
        row(f"{side} ran", len(operators), len(ran))
        differing = [o.differing(side) for o in outcomes]
        row(f"{side} differs", sum(map(bool, differing)), sum(map(len, differing)))
    wrong = [o.wrong for o in outcomes]
    row("ours differs or refuses", sum(map(bool, wrong)), sum(map(len, wrong)))
    return table


if __name__ == "__main__":
    main()
