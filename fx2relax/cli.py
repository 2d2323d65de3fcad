"""The command `fx2relax`."""

from __future__ import annotations

import click

from fx2relax._version import __version__
from fx2relax.commands import bench, cache, demo, doctor, explain, ops, tune


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fx2relax")
def main() -> None:
    """PyTorch models through Apache TVM's Relax.

    Exit codes: 0 all well; 1 something is wrong, as each command's help says; 2 a wrong command
    line.
    """


for _command in (
    demo.demo,
    ops.ops,
    doctor.doctor,
    cache.cache,
    bench.bench,
    explain.explain,
    explain.check,
    tune.tune,
):
    main.add_command(_command)
