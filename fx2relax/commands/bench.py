"""`fx2relax bench`: a user's model in eager and compiled."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
from rich import box
from rich.table import Table

from fx2relax.commands.models import read_model
from fx2relax.commands.output import as_json, console, print_json, progress, require_imports

if TYPE_CHECKING:
    from fx2relax.demo.sides import Side

_DTYPES = ("float64", "float32", "float16", "bfloat16")


@click.command()
@click.argument("model", metavar="MODEL.py:FUNCTION")
@click.option("--inductor", is_flag=True, help="Compare with PyTorch's own compiler as well.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads to compute with.")
@click.option("--dtype", type=click.Choice(_DTYPES), help="Cast weights and inputs to it first.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    default=5.0,
    show_default=True,
    help="How long to time calls.",
)
@as_json
def bench(
    model: str,
    inductor: bool,
    threads: int | None,
    dtype: str | None,
    seconds: float,
    as_json: bool,
) -> None:
    """Time a model of yours in eager and compiled, in turns, and compare the results.

    FUNCTION takes nothing and returns (module, inputs): the inputs are a tensor, a sequence of
    arguments, or a dict of them by name. The module runs as it is returned, in its mode, without
    gradients. A result is right that is within the tolerance of its dtype of eager's, or no further
    from a run in float64 than 4 times eager's own distance.

    Exits with 0; with 1 if a result is wrong or a side fails; with 2 if there is no such model, or
    it does not run in eager.
    """
    require_imports()
    import torch

    from fx2relax.demo import sides

    torch.set_num_threads(threads or torch.get_num_threads())
    found: list[Side] = []
    with progress() as bar:
        task = bar.add_task(f"{model}: read", total=5)

        def step(what: str) -> None:
            bar.update(task, description=what, advance=1)

        module, args, kwargs = read_model(model)
        measured = sides.Bench(module, args, kwargs, sides.DTYPES[dtype] if dtype else None)
        step("eager and float64")
        found.append(measured.reference())
        for backend in ("relax", *(["inductor"] if inductor else [])):
            step(f"{backend}: compile")
            found.append(measured.compiled(backend))
    # A bar with a thread of its own would disturb the clock.
    with progress(quiet=True) as bar:
        bar.add_task("timing in turns", total=None)
        measured.time(found, seconds, bar.refresh)
    right = not any(side.wrong or side.failed for side in found)
    if as_json:
        said = {
            "model": model,
            "right": right,
            "threads": torch.get_num_threads(),
            "dtype": dtype,
            "torch": torch.__version__,
            "sides": [side.as_dict() for side in found],
        }
        print_json(said)
    else:
        _show(found)
        click.echo(f"threads: {torch.get_num_threads()}, torch {torch.__version__}")
    sys.exit(0 if right else 1)


def _show(found: list[Side]) -> None:
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption="ratio: ms / eager's ms")
    for name in ("side", "compile s", "ms", "least ms", "ratio", "error vs eager"):
        out.add_column(name, justify="left" if name == "side" else "right")
    for side in found:
        if side.failed:
            out.add_row(f"[red]FAILED {side.name}[/red]", *["-"] * 5)
            continue
        out.add_row(
            f"[red]WRONG {side.name}[/red]" if side.wrong else side.name,
            f"{side.compile_seconds:.1f}",
            f"{side.ms:.3g}",
            f"{side.least_ms:.3g}",
            f"{side.ms / found[0].ms:.2f}",
            f"{side.error:.1e}",
        )
    console().print(out)
    for side in found:
        for what in (side.failed, side.wrong):
            if what:
                click.echo(f"{side.name}: {what}")
        if side.stats:
            click.echo(f"{side.name}: {_census(side)}")


def _census(side: Side) -> str:
    counts = {
        "graphs": "graphs",
        "relax_calls": "Relax calls",
        "tir_kernels": "kernels",
        "library_calls": "library calls",
        "nodes_fallback": "operators in PyTorch",
        "graphs_slower": "graphs that run in eager, which is faster",
    }
    found = {text: side.stats[key] for key, text in counts.items()}
    return ", ".join(f"{count} {text}" for text, count in found.items() if count)
