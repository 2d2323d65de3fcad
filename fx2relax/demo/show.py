"""What `fx2relax demo` runs and prints."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
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


@dataclass(frozen=True)
class Found:
    """What the demo has found.

    Attributes:
        rows: a line for each network.
        threads: how many threads all sides computed with.
    """

    rows: list[Row]
    threads: int

    @property
    def same_order(self) -> bool:
        """Whether the sentences rank as they do in eager."""
        ours, eager = ranking(self.rows[0].ours), ranking(self.rows[0].eager)
        return [sentence for _, sentence in ours] == [sentence for _, sentence in eager]

    @property
    def right(self) -> bool:
        """Whether every result is right."""
        return self.same_order and all(row.right for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON can spell it."""
        scores = [{"score": s, "sentence": sentence} for s, sentence in ranking(self.rows[0].ours)]
        return {
            "right": self.right,
            "threads": self.threads,
            "torch": torch.__version__,
            "ranking": scores,
            "networks": [row.as_dict() for row in self.rows],
        }


def measured(bar: Progress, threads: int | None = None) -> Found:
    """Compile the three networks, compare and time them.

    Args:
        bar: shows what is being done.
        threads: how many threads both sides compute with; by default as many as
            PyTorch would use.

    Raises:
        fx2relax.demo.sentences.Missing: a package of the extra ``demo`` is not installed.
    """
    threads = threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    rows: list[Row] = []
    with bar:
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
    return Found(rows, threads)


def show(found: Found, console: Console) -> None:
    """Print the ranking and the table."""
    console.print(f"[bold]{QUERY}[/bold]")
    for score, sentence in ranking(found.rows[0].ours):
        console.print(f"  {score:6.3f}  {sentence}", highlight=False)
    if not found.same_order:
        console.print("[red]WRONG: eager ranks these sentences in another order[/red]")
    console.print(table(found.rows))
    console.print(f"float32, threads: {found.threads}, torch {torch.__version__}")
