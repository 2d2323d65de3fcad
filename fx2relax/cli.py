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
