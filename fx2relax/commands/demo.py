"""`fx2relax demo`: three networks, compiled and compared."""

from __future__ import annotations

import sys

import click

from fx2relax.commands.output import as_json, print_json, progress, require_imports


@click.command()
@click.option("--threads", type=click.IntRange(min=1), help="Threads to compute with.")
@as_json
def demo(threads: int | None, as_json: bool) -> None:
    """Compile three networks; rank sentences; compare numbers and times with eager.

    Exits with 0, with 1 if a result is wrong or a package is missing.
    """
    require_imports()
    from rich.console import Console

    from fx2relax.demo import show
    from fx2relax.demo.sentences import Missing

    try:
        found = show.measured(progress(), threads)
    except Missing as error:
        raise click.ClickException(
            f"the demo needs the package {error}; install it with the others that the demo uses: "
            "pip install -c constraints.txt -e '.[demo]'"
        ) from error
    if as_json:
        print_json(found.as_dict())
    else:
        show.show(found, Console())
    sys.exit(0 if found.right else 1)
