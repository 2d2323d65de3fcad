"""What the commands print, and how: tables for people, JSON for scripts, progress for neither."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from fx2relax import installed
from fx2relax.units import seconds

if TYPE_CHECKING:
    _Parameter = click.ParamType[float]
else:  # which is generic in later versions alone
    _Parameter = click.ParamType


def json_alone(context: click.Context, parameter: click.Parameter, chosen: bool) -> bool:
    """The callback of ``--json``: what a user's model prints goes to the standard error stream."""
    if chosen:
        context.meta[_OUTPUT] = sys.stdout
        context.with_resource(contextlib.redirect_stdout(sys.stderr))
    return chosen


_OUTPUT = "fx2relax.output"
#: The option of every command that prints anything.
as_json = click.option(
    "--json", "as_json", is_flag=True, callback=json_alone, help="Print it as JSON."
)


def print_json(value: Any) -> None:
    """Print a value as JSON; a number that is not finite becomes null."""
    print_text(json.dumps(_finite(value), indent=1))


def print_text(text: str) -> None:
    """Print what `json_alone` keeps the standard output free for."""
    click.echo(text, file=click.get_current_context().meta.get(_OUTPUT))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def console(width: int = 160) -> Console:
    """The standard output; as wide as a table needs where it is no terminal."""
    found = Console()
    return found if found.is_terminal else Console(width=width)


def progress(quiet: bool = False) -> Progress:
    """A progress bar on the standard error stream, which is silent where that is no terminal.

    Args:
        quiet: it has no thread of its own, and is drawn when it is told to.
    """
    errors = Console(stderr=True)
    return Progress(
        SpinnerColumn(),
        BarColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        console=errors,
        transient=True,
        auto_refresh=not quiet,
        disable=not errors.is_terminal,
    )


class Age(_Parameter):
    """``30d``, ``12h``: a number of seconds."""

    name = "age"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Seconds of what was given; an error of the command line for anything else."""
        if isinstance(value, (int, float)):
            return float(value)
        try:
            return seconds(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def require_imports() -> None:
    """Import PyTorch and TVM; where that fails, say what mends it."""
    try:
        import fx2relax.required
        import fx2relax.tvm_import

        fx2relax.tvm_import.load()
        import fx2relax.compat
    except Exception as error:  # an installation may be broken in any way
        raise click.ClickException(str(installed.explained(error))) from error
