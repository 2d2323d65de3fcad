"""`fx2relax explain` and `fx2relax check`: a user's model, seen from inside."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from fx2relax.commands.models import read_model
from fx2relax.commands.output import as_json, console, print_json, progress, require_imports


def _of_a_model(command: Callable[..., None]) -> Callable[..., None]:
    """What both commands take: the model is read, and the rest goes on to how it is compiled."""

    @click.argument("model", metavar="MODEL.py:FUNCTION")
    @click.option("--grad", is_flag=True, help="Compile the backward graph, too.")
    @click.option("--threads", type=click.IntRange(min=1), help="Threads to compute with.")
    @click.option(
        "--library",
        type=click.Choice(("auto", "torch", "none")),
        default="auto",
        show_default=True,
    )
    @click.option("--dynamic", is_flag=True, help="Compile with symbolic sizes.")
    @as_json
    @functools.wraps(command)
    def run(
        model: str, grad: bool, threads: int | None, library: str, dynamic: bool, **own: Any
    ) -> None:
        module, args, kwargs = _read(model, threads)
        options = {"library": library}
        how = {"grad": grad, "kwargs": kwargs, "dynamic": dynamic or None, "options": options}
        command((module, *args), how, **own)

    return run


def _read(model: str, threads: int | None) -> Any:
    require_imports()
    import torch

    torch.set_num_threads(threads or torch.get_num_threads())
    return read_model(model)


@click.command()
@_of_a_model
@click.option(
    "--measure/--no-measure", default=True, show_default=True, help="Time the kernels, too."
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    default=2.0,
    show_default=True,
    help="How long to time.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the report to a file: .html or .json.",
)
def explain(
    called: tuple[Any, ...],
    how: dict[str, Any],
    measure: bool,
    seconds: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """Say which kernel computes each operator and line of a model, and how long it takes.

    FUNCTION takes nothing and returns (module, inputs), as for `fx2relax bench`.

    Exits with 0; with 2 if there is no such model, or eager cannot run it.
    """
    import fx2relax

    with progress() as bar:
        task = bar.add_task("compile", total=None)
        report = fx2relax.explain(*called, **how)
        if measure:
            bar.update(task, description="measure")
            report.measure(seconds)
    if out is not None:
        report.save(str(out))
    if as_json:
        print_json(json.loads(report.to_json()))
    elif out is None:
        report.show(console())
    else:
        click.echo(f"written to {out}")


@click.command()
@_of_a_model
@click.option(
    "--tolerance", type=click.FloatRange(min=0), help="Of an error; by dtype if left out."
)
@click.option(
    "--reproduce",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write a script for each kernel that is wrong into this folder.",
)
def check(
    called: tuple[Any, ...],
    how: dict[str, Any],
    tolerance: float | None,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Compare every kernel of a model with PyTorch, and name those that are wrong.

    FUNCTION takes nothing and returns (module, inputs), as for `fx2relax bench`.

    Exits with 0; with 1 if a kernel is wrong or a graph cannot be compiled; with 2 if there is no
    such model, or eager cannot run it.
    """
    import fx2relax

    with progress() as bar:
        bar.add_task("compile and compare", total=None)
        found = fx2relax.check(*called, **how, tolerance=tolerance)
    scripts = found.reproduce(folder) if folder is not None else []
    if as_json:
        print_json({**found.as_dict(), "scripts": [str(path) for path in scripts]})
    else:
        click.echo(str(found))
        for path in scripts:
            click.echo(f"script: {path}")
    sys.exit(0 if found.right else 1)
