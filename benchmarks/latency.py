"""Median latency of networks in eager, under Inductor and under Relax, the calls interleaved.

    python benchmarks/latency.py                    # every network of tests/networks and the demo's
    python benchmarks/latency.py resnet18 bert --train --threads 2

Interleaving lets every side see the machine in the same state; the spread (interquartile range over
the median) says how far to believe a ratio.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from networks import NETWORKS

from fx2relax.demo import networks as demo

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def _demo(builder: Callable[[], tuple[nn.Module, torch.Tensor]]) -> Built:
    model, x = builder()
    return model, (x,), {}


BUILDERS: dict[str, Callable[[], Built]] = {
    **{name: network.build for name, network in NETWORKS.items()},
    "demo-resnet18": lambda: _demo(demo.resnet18),
    "demo-decoder": lambda: _demo(demo.decoder),
}


def call(fn: Callable[..., Any], model: nn.Module, built: Built, train: bool) -> Callable[[], None]:
    """One call to be timed: inference, or a forward and a backward pass."""
    _, args, kwargs = built

    def infer() -> None:
        with torch.no_grad():
            fn(*args, **kwargs)

    def step() -> None:
        model.zero_grad()
        outputs = pytree.tree_leaves(fn(*args, **kwargs))
        sum(out.square().mean() for out in outputs).backward()

    return step if train else infer


def interleave(sides: dict[str, Callable[[], None]], budget: float) -> dict[str, list[float]]:
    """Milliseconds of each call of each side, in turns, for `budget` seconds."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    end = time.perf_counter() + budget
    while len(times["eager"]) < 5 or time.perf_counter() < end:
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            times[name].append(1000 * (time.perf_counter() - start))
    return times


def spread(values: list[float]) -> float:
    low, median, high = statistics.quantiles(values, n=4)
    return (high - low) / median


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(BUILDERS)))
@click.option("--threads", type=click.IntRange(min=1), help="Threads for every side.")
@click.option("--train", is_flag=True, help="Forward and backward instead of inference.")
@click.option("--inductor/--no-inductor", default=True, help="Time Inductor too.")
@click.option("--budget", default=3.0, show_default=True, help="Seconds for each network.")
def main(
    names: tuple[str, ...], threads: int | None, train: bool, inductor: bool, budget: float
) -> None:
    """Time the networks NAMES, or all of them."""
    torch.set_num_threads(threads or torch.get_num_threads())
    backends = ["inductor", "relax"] if inductor else ["relax"]
    table = Table(caption=f"ms, median (spread); compile s; threads: {torch.get_num_threads()}")
    for heading in ("network", "eager", *backends, *(f"{b}/eager" for b in backends)):
        table.add_column(heading, justify="left" if heading == "network" else "right")
    for name in names or BUILDERS:
        torch._dynamo.reset()
        built = BUILDERS[name]()
        model = built[0].train(train)
        sides = {"eager": call(model, model, built, train)}
        seconds = {}
        for backend in backends:
            sides[backend] = call(torch.compile(model, backend=backend), model, built, train)
            start = time.perf_counter()
            sides[backend]()
            seconds[backend] = time.perf_counter() - start
        times = interleave(sides, budget)
        medians = {side: statistics.median(values) for side, values in times.items()}
        cells = [f"{medians['eager']:.2f} ({spread(times['eager']):.0%})"]
        cells += [f"{medians[b]:.2f} ({spread(times[b]):.0%}); {seconds[b]:.1f}s" for b in backends]
        cells += [f"{medians[b] / medians['eager']:.2f}" for b in backends]
        table.add_row(name, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
