"""`fx2relax ops`: how each core operator runs."""

from __future__ import annotations

import click

from fx2relax.commands.output import as_json, print_text, progress, require_imports


@click.command()
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@as_json
@click.option("--summary", is_flag=True, help="Print the totals of all operators, in Markdown.")
def ops(patterns: tuple[str, ...], as_json: bool, summary: bool) -> None:
    """How each core ATen operator runs: by a converter, a decomposition, or in PyTorch.

    One call of each is imported, in every dtype that eager takes, with symbolic sizes, and with its
    backward graph. PATTERN is a shell pattern of names such as aten.add.Tensor.

    Exits with 0, or with 2 where no operator matches.
    """
    require_imports()
    from rich.console import Console

    from fx2relax import coverage, coverage_report

    targets = coverage.chosen(() if summary else patterns)
    if not targets:
        raise click.BadParameter(f"no core ATen operator matches {' '.join(patterns)}")
    rows = coverage_report.measured(targets, progress())
    if summary:
        click.echo(coverage_report.summary(rows))
    elif as_json:
        print_text(coverage_report.as_json(rows))
    else:
        coverage_report.show(rows, Console())
