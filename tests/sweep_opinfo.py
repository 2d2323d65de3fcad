"""Every operator of PyTorch's `op_db`, every dtype, forwards, backwards and in place.

    python tests/sweep_opinfo.py --out sweep.jsonl

Each sample is compared with eager in shape, dtype, strides, aliasing and value. Rows that the file
holds already are not run again; ``--report`` reads it alone.
"""

from __future__ import annotations

import fnmatch
import json
import random
import tempfile
from pathlib import Path

import click
from opinfo.check import Outcome, run
from opinfo.report import show
from opinfo.rows import DTYPES, Row, rows
from workers import each

MANNERS = ("forward", "gradient", "inplace")


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), default=Path("sweep.jsonl"))
@click.option("--op", "patterns", multiple=True, help="Operators, as shell patterns.")
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(list(DTYPES)))
@click.option("--manner", "manners", multiple=True, type=click.Choice(MANNERS))
@click.option("--samples", default=3, show_default=True, help="Samples of a row, about.")
@click.option("--workers", default=2, show_default=True)
@click.option("--seconds", default=180.0, show_default=True, help="Time that one row may take.")
@click.option("--emulated", is_flag=True, help="Run kernels for NVIDIA GPUs, on the processor.")
@click.option("--report", "only_report", is_flag=True, help="Run nothing.")
def main(
    out: Path,
    patterns: tuple[str, ...],
    dtypes: tuple[str, ...],
    manners: tuple[str, ...],
    samples: int,
    workers: int,
    seconds: float,
    emulated: bool,
    only_report: bool,
) -> None:
    def wanted(name: str) -> bool:
        return not patterns or any(fnmatch.fnmatchcase(name, p) for p in patterns)

    outcomes = _read(out)
    if not only_report:
        ran = {(o.op, o.dtype, o.manner) for o in outcomes}
        chosen = rows(dtypes or tuple(DTYPES), manners or MANNERS, wanted)
        todo = [r for r in chosen if (r.op, r.dtype, r.manner) not in ran]
        # Slow operators lie together in `op_db`.
        random.Random(0).shuffle(todo)
        with out.open("a") as file:

            def done(outcome: Outcome) -> None:
                file.write(json.dumps(outcome.as_dict()) + "\n")
                file.flush()
                outcomes.append(outcome)

            pieces = [(row, samples) for row in todo]
            check = run_emulated if emulated else run
            each(check, pieces, _failed, done, title="rows", workers=workers, seconds=seconds)
    show(outcomes)
    raise SystemExit(1 if any(o.failures for o in outcomes) else 0)


def run_emulated(row: Row, limit: int) -> Outcome:
    """`run` with kernels for a GPU; half of the rows begin with the last thread."""
    from cuda_emulated import emulated

    with tempfile.TemporaryDirectory() as folder, emulated(Path(folder)) as gpu:
        gpu.backwards = len(row.op) % 2 == 1
        return run(row, limit)


def _failed(piece: tuple[Row, int], why: str) -> Outcome:
    row, _ = piece
    return Outcome(row.op, row.dtype, row.manner, 1, 0, [why])


def _read(out: Path) -> list[Outcome]:
    if not out.exists():
        return []
    return [Outcome(**json.loads(line)) for line in out.read_text().splitlines()]


if __name__ == "__main__":
    main()
