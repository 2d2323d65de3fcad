"""What `fx2relax demo` runs and prints."""

from __future__ import annotations

import itertools

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

from fx2relax.demo import networks
from fx2relax.demo.measure import Row, compile_and_check, time_calls
from fx2relax.demo.sentences import QUERY, minilm, ranking


def _resnet() -> tuple[nn.Module, dict[str, Tensor]]:
    model, x = networks.resnet18()
    return model, {"x": x}


def _decoder() -> tuple[nn.Module, dict[str, Tensor]]:
    model, tokens = networks.decoder()
    return model, {"tokens": tokens}


NETWORKS = {"MiniLM": minilm, "ResNet-18": _resnet, "GPT-2 style": _decoder}


def table(rows: list[Row]) -> Table:
    """The one table of the demo."""
    # No padding and two-line headings: ten columns must fit a terminal of 80.
    out = Table(box=box.SIMPLE_HEAD, padding=0, caption="ratio: relax ms / eager ms")
    out.add_column("network", no_wrap=True)
    for name in (
        "error vs\neager",
        "error vs\nfloat64",
        "eager\nms",
        "relax\nms",
        "ratio",
        "compile\ns",
        "Relax\ncalls",
        "TIR\nkernels",
        "torch\ncalls",
    ):
        out.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        out.add_row(
            row.name if row.right else f"[red]WRONG {row.name}[/red]",
            f"{row.error:.1e}",
            f"{row.exact_error:.1e}",
            f"{row.eager_ms:.1f}",
            f"{row.relax_ms:.1f}",
            f"{row.relax_ms / row.eager_ms:.2f}",
            f"{row.compile_seconds:.1f}",
            str(row.stats["relax_calls"]),
            str(row.stats["tir_kernels"]),
            str(row.stats["nodes_fallback"]),
        )
    return out


def run(console: Console, threads: int | None = None) -> bool:
    """Compile the three networks, print the ranking and the table.

    Args:
        console: where to print; the progress bar is silent unless it is a terminal.
        threads: how many threads both sides compute with; by default as many as
            PyTorch would use.

    Returns:
        whether every result is right.

    Raises:
        fx2relax.demo.sentences.Missing: a package of the extra ``demo`` is not installed.
    """
    threads = threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    rows: list[Row] = []
    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        # Three steps for each network: build, run in eager, compile.
        task = bar.add_task("", total=3 * len(NETWORKS))

        done = itertools.count()

        def step(message: str) -> None:
            bar.update(task, description=message, completed=next(done))

        for name, build in NETWORKS.items():
            rows.append(compile_and_check(name, build, step))
    # The bar's own thread would disturb the clock: it has ended by now.
    for row in rows:
        time_calls(row)

    ours, eager = ranking(rows[0].ours), ranking(rows[0].eager)
    console.print(f"[bold]{QUERY}[/bold]")
    for score, sentence in ours:
        console.print(f"  {score:6.3f}  {sentence}", highlight=False)
    same = [sentence for _, sentence in ours] == [sentence for _, sentence in eager]
    if not same:
        console.print("[red]WRONG: eager ranks these sentences in another order[/red]")
    console.print(table(rows))
    console.print(f"float32, threads: {threads}, torch {torch.__version__}")
    return same and all(row.right for row in rows)
