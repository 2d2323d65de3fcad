"""`fx2relax doctor`: what is installed, what works, and what mends the rest."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.text import Text

from fx2relax.commands.output import as_json, print_json, progress

if TYPE_CHECKING:
    from fx2relax.doctor import Finding

_STYLES = {"ok": "green", "warning": "yellow", "broken": "bold red", "skipped": "dim"}


@click.command()
@as_json
def doctor(as_json: bool) -> None:
    """Look at the installation: versions, compilers, processor, GPU, cache, and a small model.

    Each problem comes with the command that mends it. It takes some seconds, half a minute where
    the native helper is compiled for the first time. Nothing that is missing keeps it from the
    rest: PyTorch and TVM are tried in a process of their own.

    Exits with 0 where all is well or there are warnings alone; with 1 where something is broken, so
    that models cannot be compiled.
    """
    from fx2relax.doctor import examine

    with progress() as bar:
        task = bar.add_task("looking", total=None)
        found = examine(lambda what: bar.update(task, description=what))
    counts = Counter(finding.status for finding in found)
    status = next((s for s in ("broken", "warning") if counts[s]), "ok")
    if as_json:
        print_json({"status": status, "findings": [vars(finding) for finding in found]})
    else:
        _show(found)
        wrong = [f"{counts[s]} {s}" for s in ("broken", "warning") if counts[s]]
        click.echo(f"\n{', '.join(wrong) if wrong else 'All is well.'}")
    sys.exit(1 if counts["broken"] else 0)


def _show(found: list[Finding]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    width = max(len(finding.name) for finding in found)
    section = None
    for finding in found:
        if finding.section != section:
            section = finding.section
            console.print(Text(section, "bold"))
        line = Text("  ")
        line.append(f"{finding.status:<8}", _STYLES[finding.status])
        line.append(f"{finding.name:<{width}}  {finding.text}")
        console.print(line)
        if finding.mend:
            console.print(Text(f"{'':{12 + width}}$ {finding.mend}", "cyan"))
