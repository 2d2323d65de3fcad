"""`fx2relax tune`: the kernels of a user's model are given faster schedules."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.table import Table

from fx2relax.commands.models import read_model
from fx2relax.commands.output import as_json, console, print_json, progress, require_imports
from fx2relax.units import duration_text, share_text

if TYPE_CHECKING:
    from fx2relax.tuner import Tuned


@click.command()
@click.argument("model", metavar="MODEL.py:FUNCTION")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="How long, over all kernels; 0 says what is known.",
)
@click.option(
    "--database",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder that is read and written; the cache's if left out.",
)
@click.option(
    "--library", type=click.Choice(("auto", "torch", "none")), default="auto", show_default=True
)
@click.option("--grad", is_flag=True, help="Tune the backward graph, too.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads to compute with.")
@click.option("--tracker", help="Measure on the devices of this tracker of TVM's: HOST:PORT.")
@click.option("--key", help="What the tracker knows the devices by.")
@as_json
def tune(
    model: str,
    seconds: float,
    database: Path | None,
    library: str,
    grad: bool,
    threads: int | None,
    tracker: str | None,
    key: str | None,
    as_json: bool,
) -> None:
    """Look for faster schedules of a model's kernels, and keep those that are clearly faster.

    FUNCTION takes nothing and returns (module, inputs), as for `fx2relax bench`. What is found is
    kept in a database, from which another run goes on; it can be interrupted at any time. A model
    uses it with `options={"tune": {"seconds": 0, "database": FOLDER}}`.

    Exits with 0; with 1 if the database cannot be written; with 2 if there is no such model,
    tracker or device, or the model does not run in eager.
    """
    require_imports()
    import torch

    import fx2relax
    from fx2relax.errors import OptionError

    torch.set_num_threads(threads or torch.get_num_threads())
    module, args, kwargs = read_model(model)
    with progress() as bar:
        task = bar.add_task("compile", total=seconds or None)
        tried = faster = 0

        def tell(step: dict[str, Any]) -> None:
            nonlocal tried, faster
            if "comparing" in step:
                bar.update(task, description="compare")
            elif "spent" in step:
                bar.update(task, completed=min(step["spent"], seconds))
            elif "tried" in step:
                tried += 1
                faster += bool(step.get("accepted"))
                text = f"{step.get('name', '')}: {tried} schedules, {faster} faster"
                bar.update(task, description=text)

        try:
            found = fx2relax.tune(
                module,
                *args,
                seconds=seconds,
                database=database,
                library=library,
                grad=grad,
                kwargs=kwargs,
                tracker=tracker,
                key=key,
                tell=tell,
            )
        except OptionError as error:
            raise click.UsageError(str(error)) from error
        except OSError as error:
            mend = "name another folder by --database or $FX2RELAX_CACHE_DIR"
            raise click.ClickException(f"the database cannot be used: {error}; {mend}") from error
    if as_json:
        print_json(found.as_dict())
        return
    console().print(_table(found))
    click.echo(_summary(found))


def _table(found: Tuned) -> Table:
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("kernel", "calls", "share", "ours", "tuned", "times as fast", "by", "tried"):
        out.add_column(name, justify="left" if name in ("kernel", "by") else "right")
    for each in found.kernels:
        own = each.own
        out.add_row(
            each.name,
            str(each.calls),
            "" if each.share is None else share_text(each.share, 1.0),
            duration_text(own),
            duration_text(own * each.ratio) if own is not None and each.ratio < 1 else "",
            f"{1 / each.ratio:.2f}" if each.ratio < 1 else "",
            "our rules" if each.how == "own" else each.how,
            str(each.tried),
        )
    return out


def _summary(found: Tuned) -> str:
    lines = [
        f"{found.tried} schedules in {found.seconds:.1f} s, of which {found.failed} cannot be used"
    ]
    if found.symbolic:
        lines.append(f"not tuned, since sizes are not known: {', '.join(found.symbolic)}")
    if found.before is not None and found.after is not None:
        now = duration_text(found.after)
        lines.append(f"a call of {found.model}: {duration_text(found.before)} before, {now} now")
    elif not any(each.ratio < 1 for each in found.kernels):
        lines.append("nothing faster is known: all kernels keep the schedules of our rules")
    lines.append(f"database: {found.database}")
    return "\n".join(lines)
