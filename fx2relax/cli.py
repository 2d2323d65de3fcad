"""The command `fx2relax`."""

from __future__ import annotations

import sys

import click
from rich.console import Console

from fx2relax._version import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fx2relax")
def main() -> None:
    """PyTorch models through Apache TVM's Relax."""


@main.command()
@click.option("--threads", type=click.IntRange(min=1), help="Threads to compute with.")
def demo(threads: int | None) -> None:
    """Compile three networks; rank sentences; compare numbers and times with eager.

    Exits with 1 if a result is wrong.
    """
    from fx2relax.demo import show
    from fx2relax.demo.sentences import Missing

    try:
        right = show.run(Console(), threads)
    except Missing as error:
        raise click.ClickException(
            f"the demo needs the package {error}; install it with the others that the demo uses: "
            "pip install -c constraints.txt -e '.[demo]'"
        ) from error
    sys.exit(0 if right else 1)


@main.command()
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print all that was measured, as JSON.")
@click.option("--summary", is_flag=True, help="Print the totals of all operators, in Markdown.")
def ops(patterns: tuple[str, ...], as_json: bool, summary: bool) -> None:
    """How each core ATen operator runs: by a converter, a decomposition, or in PyTorch.

    One call of each is imported, in every dtype that eager takes, with symbolic sizes, and with its
    backward graph. PATTERN is a shell pattern of names such as aten.add.Tensor.
    """
    from fx2relax import coverage, coverage_report

    targets = coverage.chosen(() if summary else patterns)
    if not targets:
        raise click.BadParameter(f"no core ATen operator matches {' '.join(patterns)}")
    console = Console()
    rows = coverage_report.measured(targets, console)
    if summary:
        click.echo(coverage_report.summary(rows))
    elif as_json:
        click.echo(coverage_report.as_json(rows))
    else:
        coverage_report.show(rows, console)
