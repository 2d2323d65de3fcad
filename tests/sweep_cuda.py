"""Every kernel of the benchmark networks for NVIDIA GPUs, without one.

    python tests/sweep_cuda.py --out cuda.jsonl

Each network is compiled in each dtype, with products left to PyTorch and without, for each of three
architectures. How its kernels are launched is held to what GPUs launch, and nvcc translates them
to machine code, each text once. Rows that the file holds already are not run again; ``--report``
reads it alone.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
from cuda_cases import gpus_of
from cuda_networks import DTYPES, NETWORKS, network
from cuda_text import NVCC, Text, Translated, Translator, text_of_draft
from rich.console import Console
from rich.table import Table
from workers import each

from fx2relax import drafts
from fx2relax.options import Options
from fx2relax.pipeline.launches import SHARED

ARCHES = (80, 90, 100)
LIBRARIES = ("torch", "none")
Cell = tuple[str, str, str]


@dataclass
class Row:
    """One network in one dtype with one library.

    Attributes:
        cell: the three.
        kernels: how many it has for each architecture.
        failures: what does not compile or launch.
        spilled: kernels with too few registers, and the bytes of a thread that went elsewhere.
        registers: the most of any kernel.
        seconds: what it took.
    """

    cell: Cell
    kernels: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    spilled: dict[str, int] = field(default_factory=dict)
    registers: int = 0
    seconds: float = 0.0


def one(name: str, dtype: str, library: str, arches: Sequence[int], cache: Path) -> Row:
    """Compile a cell and translate its kernels."""
    start = time.perf_counter()
    row = Row((name, dtype, library))
    translate = Translator(cache)
    with gpus_of(arches[0]):
        draft = drafts.draft_of(*network(name, dtype), Options(library=library), False)
    for arch in arches:
        with gpus_of(arch):
            text = text_of_draft(draft, library)
        row.kernels[str(arch)] = len(text.kernels)
        _judge(row, arch, text, translate(text, arch))
    row.seconds = time.perf_counter() - start
    return row


def _judge(row: Row, arch: int, text: Text, found: dict[str, Translated]) -> None:
    row.failures += [f"sm_{arch}: {fault}" for fault in text.faults()]
    for name, kernel in found.items():
        if kernel.error:
            row.failures.append(f"sm_{arch}: {name}: {kernel.error}")
        if kernel.shared > SHARED:
            row.failures.append(f"sm_{arch}: {name}: {kernel.shared} bytes of shared memory")
        if kernel.spilled or kernel.local:
            row.spilled[f"sm_{arch} {name}"] = kernel.spilled + kernel.local
        row.registers = max(row.registers, kernel.registers)


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), default=Path("cuda.jsonl"))
@click.option("--network", "names", multiple=True, type=click.Choice(list(NETWORKS)))
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(list(DTYPES)))
@click.option("--library", "libraries", multiple=True, type=click.Choice(LIBRARIES))
@click.option("--arch", "arches", multiple=True, type=int, default=ARCHES, show_default=True)
@click.option(
    "--cache",
    type=click.Path(path_type=Path),
    default=Path("build/cuda"),
    show_default=True,
    help="Where it is noted what nvcc made of a kernel.",
)
@click.option("--workers", default=2, show_default=True)
@click.option("--seconds", default=900.0, show_default=True, help="Time that one row may take.")
@click.option("--report", "only_report", is_flag=True, help="Run nothing.")
def main(
    out: Path,
    names: tuple[str, ...],
    dtypes: tuple[str, ...],
    libraries: tuple[str, ...],
    arches: tuple[int, ...],
    cache: Path,
    workers: int,
    seconds: float,
    only_report: bool,
) -> None:
    rows = _read(out)
    if not only_report:
        if NVCC is None:
            raise click.UsageError("there is no nvcc on the path")
        ran = {row.cell for row in rows}
        cells = itertools.product(names or NETWORKS, dtypes or DTYPES, libraries or LIBRARIES)
        pieces = [(*cell, arches, cache.absolute()) for cell in cells if cell not in ran]
        with out.open("a") as file:

            def done(row: Row) -> None:
                file.write(json.dumps(asdict(row)) + "\n")
                file.flush()
                rows.append(row)

            each(one, pieces, _failed, done, title="rows", workers=workers, seconds=seconds)
    raise SystemExit(1 if show(rows) else 0)


def _failed(piece: tuple[str, str, str, Sequence[int], Path], why: str) -> Row:
    return Row(piece[:3], failures=[" ".join(why.split())[-500:]])


def _read(out: Path) -> list[Row]:
    lines = out.read_text().splitlines() if out.exists() else []
    rows = [Row(**json.loads(line)) for line in lines]
    for row in rows:
        row.cell = (row.cell[0], row.cell[1], row.cell[2])
    return rows


def show(rows: Sequence[Row], console: Console | None = None) -> int:
    """Print each failure and the table; how many rows failed."""
    console = console or Console(width=160)
    table = Table(title="Kernels for NVIDIA GPUs; failures in red")
    table.add_column("network")
    columns = list(itertools.product(DTYPES, LIBRARIES))
    for dtype, library in columns:
        table.add_column(f"{dtype} {library}", justify="right")
    known = {row.cell: row for row in rows}
    for name in NETWORKS:
        table.add_row(name, *(_cell(known.get((name, *column))) for column in columns))
    console.print(table)
    for row in rows:
        for failure in row.failures:
            console.print(f"{' '.join(row.cell)}: {failure}", style="red", markup=False)
    spilled = {kernel: size for row in rows for kernel, size in row.spilled.items()}
    bad = sum(bool(row.failures) for row in rows)
    console.print(
        f"{len(rows)} rows, {sum(sum(row.kernels.values()) for row in rows)} kernels, {bad} rows "
        f"with failures; {sum(row.seconds for row in rows):.0f} s; {len(spilled)} kernels spill "
        f"registers, at most {max(spilled.values(), default=0)} bytes of a thread"
    )
    return bad


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    count = "/".join(map(str, sorted(set(row.kernels.values()))))
    return f"[red]{len(row.failures)} of {count or '?'}[/red]" if row.failures else count


if __name__ == "__main__":
    main()
