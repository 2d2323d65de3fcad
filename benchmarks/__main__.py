"""Time networks and kernels under several compilers, interleaved, one process a cell.

Writes results.json, table.md and plots into a folder.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.cases import KERNELS, NETWORKS, TRAINED
from benchmarks.driver import Driver, Settings, groups
from benchmarks.plots import draw
from benchmarks.results import Group, Results, environment, gpus
from benchmarks.sides import OURS, SIDES, split
from benchmarks.tables import markdown, show

QUICK_NETWORKS = ("mlp", "resnet18", "bert", "llama-decode")
QUICK_KERNELS = ("gelu-chain", "softmax", "sum-outer")


def _names(known: Sequence[str]) -> Callable[..., list[str] | None]:
    """Reads names out of a list, separated by commas, or ``all``, or ``none``."""

    def read(ctx: Any, param: Any, value: str | None) -> list[str] | None:
        if value is None or value in ("all", "none"):
            return None if value is None else list(known) if value == "all" else []
        for each in value.split(","):
            if each not in known:
                raise click.BadParameter(f"{each!r} is not one of {', '.join(known)}")
        return value.split(",")

    return read


def _counts(ctx: Any, param: Any, value: str | None) -> list[int] | None:
    """Reads positive numbers, separated by commas."""
    try:
        counts = [int(each) for each in value.split(",")] if value is not None else None
    except ValueError:
        counts = [0]
    if counts is not None and min(counts) < 1:
        raise click.BadParameter(f"{value!r} is not a list of positive numbers")
    return counts


def _optioned(ctx: Any, param: Any, values: tuple[str, ...]) -> list[str]:
    """Columns of our backend with options."""
    labels = [f"{OURS} {' '.join(value.split(','))}" for value in values]
    for label in labels:
        try:
            split(label)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error
    return labels


def _write(results: Results, folder: Path, console: Console) -> None:
    """Everything but the JSON file."""
    show(results, console)
    draw(results, folder)
    (folder / "table.md").write_text(markdown(results), encoding="utf-8")
    console.print(f"written to {folder}")


def _run(results: Results, wanted: list[Group], driver: Driver, path: Path) -> None:
    """Run the groups that the results do not have yet, and save after each."""
    done = {group.key: set(group.cells) for group in results.groups}
    wanted = [g for g in wanted if not set(driver.sides) <= done.get(g.key, set())]
    if not wanted:
        return
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(wanted))
        driver.say = lambda message: progress.update(task, description=message)
        results.first_use |= driver.prime()
        for group in wanted:
            results.put(driver.run(group))
            results.save(path)
            progress.advance(task)
    shutil.rmtree(driver.work, ignore_errors=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, help=__doc__)
@click.option("--networks", callback=_names(list(NETWORKS)), help="Names, all or none.")
@click.option("--kernels", callback=_names(list(KERNELS)), help="Names, all or none.")
@click.option("--sides", callback=_names(list(SIDES)), default="all", help="Names; default all.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Of weights and arguments.",
)
@click.option("--threads", callback=_counts, help="Default 1,2; 1 on a GPU.")
@click.option("--batch", callback=_counts, help="Default 1,8; 1,16 on a GPU; the MLP has 1,64.")
@click.option("--rounds", type=click.IntRange(1), help="The most rounds of a cell; default 20.")
@click.option("--seconds", type=click.FloatRange(0.01), help="A cell's time; default 10.")
@click.option("--timeout", default=900.0, show_default=True, help="Of compiling, in seconds.")
@click.option("--quick", is_flag=True, help="A sample, in about 10 minutes.")
@click.option("--inference", is_flag=True, help="Inference in float32; the default.")
@click.option("--train", is_flag=True, help=f"A training step of {', '.join(TRAINED)}.")
@click.option("--autocast", is_flag=True, help="Inference under autocast to bfloat16.")
@click.option("--cold/--no-cold", default=True, help="Also compile with empty caches.")
@click.option(
    "--options",
    "optioned",
    metavar="KEY=VALUE,...",
    multiple=True,
    callback=_optioned,
    help="Another column of relax, with these options; may be given again.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/benchmarks"),
    show_default=True,
    help="The folder to write to.",
)
@click.option("--resume", is_flag=True, help="Go on with the results that the folder holds.")
@click.option(
    "--from",
    "source",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Run nothing; write the table and the plots of these results.",
)
def main(
    networks: list[str] | None,
    kernels: list[str] | None,
    sides: list[str],
    device: str,
    dtype: str,
    threads: list[int] | None,
    batch: list[int] | None,
    rounds: int | None,
    seconds: float | None,
    timeout: float,
    quick: bool,
    inference: bool,
    train: bool,
    autocast: bool,
    cold: bool,
    optioned: list[str],
    out: Path,
    resume: bool,
    source: Path | None,
) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=160)
    path = out / "results.json"
    if source is not None:
        try:
            results = Results.load(source)
        except (ValueError, KeyError, TypeError) as error:
            raise click.ClickException(f"{source} holds no results: {error}") from error
        out.mkdir(parents=True, exist_ok=True)
        _write(results, out, console)
        return
    if device == "cuda":
        if gpus() is None:
            raise click.UsageError("nvidia-smi finds no GPU")
        threads, batch = threads or [1], batch or [1, 16]
    sides = [side for side in sides if device in SIDES[side].devices]
    if networks is None and kernels is None:
        networks = list(QUICK_NETWORKS if quick else NETWORKS)
        kernels = list(QUICK_KERNELS if quick else KERNELS)
    if quick:
        threads, batch = threads or [1], batch or [1]
        rounds, seconds = rounds or 8, seconds or 2.0
    given = {"inference": inference, "train": train, "autocast": autocast}
    modes = [mode for mode, on in given.items() if on] or ["inference"]
    wanted = groups(modes, [*(networks or []), *(kernels or [])], batch, threads or [1, 2])
    if not wanted:
        raise click.UsageError("there is nothing to run")
    results = Results(environment(sys.argv[1:], device, dtype))
    if path.exists():
        if not resume:
            raise click.UsageError(f"{path} exists: --resume goes on with it, --out names another")
        results = Results.load(path)
    settings = Settings(rounds or 20, seconds or 10.0, timeout, cold, device=device, dtype=dtype)
    _run(results, wanted, Driver([*sides, *optioned], out, settings), path)
    _write(results, out, console)


if __name__ == "__main__":
    main()
