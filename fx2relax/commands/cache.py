"""`fx2relax cache`: what the cache holds, and removing it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.table import Table

from fx2relax.commands.output import Age, as_json, console, print_json
from fx2relax.units import age_text, size_text

if TYPE_CHECKING:
    from fx2relax.contents import Item


@click.group()
def cache() -> None:
    """Compiled programs on disk: list them, remove them, see what they take.

    They are in $FX2RELAX_CACHE_DIR, or in the user's cache folder. All of this is safe beside
    running processes: one whose entry is gone compiles again.
    """


@cache.command("list")
@as_json
def show(as_json: bool) -> None:
    """Every entry: its age, size, hits, what it consists of, and which way it runs.

    A program is named by the beginning of its key. "fastest" is what the first calls of the graph
    have shown: "torch" is the program that calls PyTorch's kernels, "generated" the one that does
    not, "eager" runs without either; "tuned" ones have kernels that were tuned. Helpers are
    libraries of this package, kernels are objects compiled of your own sources, databases are what
    `fx2relax tune` measured.

    Exits with 0, or with 1 where the folder is not its owner's alone, so that it is not used.
    """
    found = _items()
    if as_json:
        print_json({"entries": [item.as_dict() for item in found]})
        return
    if not found:
        click.echo("The cache is empty.")
        return
    console().print(_table(found))


def _table(found: Sequence[Item]) -> Table:
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("entry", "kind", "size", "made", "used", "hits", "consists of", "torch", "tvm"):
        right = name in ("size", "made", "used", "hits")
        out.add_column(name, justify="right" if right else "left", overflow="fold")
    out.add_column("fastest", overflow="fold")
    for item in found:
        name = item.name[:12] if item.kind == "program" else item.name
        about = item.about
        out.add_row(
            name,
            item.kind,
            size_text(item.bytes),
            age_text(item.made),
            age_text(item.used),
            "" if item.hits is None else str(item.hits),
            item.problem or _consists(about),
            str(about.get("torch", "")),
            str(about.get("tvm", "")),
            _fastest(item.fastest),
        )
    return out


def _consists(about: dict[str, Any]) -> str:
    kernels = about.get("kernels")
    kernels = kernels if isinstance(kernels, dict) else {}
    counts = {
        "operators": about.get("operators"),
        "kernels": kernels.get("tir_kernels"),
        "library calls": kernels.get("library_calls"),
    }
    found = [f"{n} {what}" for what, n in counts.items() if n is not None]
    if about.get("library") in ("none", "generated"):
        found.append("all generated")
    if str(about.get("library")).startswith("tuned "):
        found.append("tuned")
    return ", ".join(found)


def _fastest(found: dict[str, str]) -> str:
    """One word where all sizes have one verdict, else each with its sizes."""
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    return ", ".join(f"{sizes} {way}" for sizes, way in found.items())


@cache.command()
@as_json
def size(as_json: bool) -> None:
    """What the cache takes, what it may take, and the free space beside it.

    Exits with 0, or with 1 where the folder is not its owner's alone, so that it is not used.
    """
    from fx2relax import contents

    found = contents.sizes(_items())
    if as_json:
        print_json(found)
        return
    click.echo(found["folder"])
    for kind, each in found["kinds"].items():
        count = each["entries"]
        name = kind if count == 1 else f"{kind}s"
        click.echo(f"  {count} {name}: {size_text(each['bytes'])}")
    limit, free = size_text(found["limit"]), size_text(found["free"])
    click.echo(f"  in all: {size_text(found['bytes'])}; programs may take {limit}; free: {free}")


@cache.command()
@click.option(
    "--older-than", type=Age(), help="Only what was not used for so long: 30d, 12h, 90m, 45s, 2w."
)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@as_json
def clear(older_than: float | None, yes: bool, as_json: bool) -> None:
    """Remove entries, and what interrupted processes have left.

    Exits with 0, also where there is nothing to remove; with 1 where you say no, where the folder
    is not its owner's alone, or where an entry cannot be removed.
    """
    from fx2relax import contents

    now = time.time()
    chosen = [i for i in _items() if older_than is None or now - i.used > older_than]
    total = sum(item.bytes for item in chosen)
    if chosen and not yes:
        entries = "entry" if len(chosen) == 1 else "entries"
        click.confirm(f"Remove {len(chosen)} {entries} ({size_text(total)})?", abort=True, err=True)
    gone = contents.remove(chosen)
    left = [item for item in chosen if item.files[0].exists()]
    if as_json:
        print_json({"removed": len(chosen) - len(left), "bytes": gone, "failed": len(left)})
    else:
        click.echo(f"Removed {len(chosen) - len(left)} entries, {size_text(gone)}.")
    if left:
        raise click.ClickException(f"{left[0].files[0]} cannot be removed")


def _items() -> list[Item]:
    from fx2relax import contents

    try:
        return contents.items()
    except OSError as error:
        raise click.ClickException(f"the cache is not used: {error}") from error
