"""Compile a network, hold its numbers to eager's and to a float64 run's, and time both."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fx2relax
from fx2relax.never_slower import SETTLED


@dataclass
class Row:
    """One network's line in the table.

    Attributes:
        name: the network.
        eager, ours: its outputs in float32.
        error: the largest difference from eager.
        exact_error: the largest difference from the float64 run.
        eager_exact_error: eager's own.
        stats: `fx2relax.stats()` of its compilation.
        compile_seconds: the first call, tracing included.
        eager_ms, relax_ms: median times of a call, once `time_calls` has run.
    """

    name: str
    eager: Tensor
    ours: Tensor
    error: float
    exact_error: float
    eager_exact_error: float
    stats: dict[str, Any]
    compile_seconds: float
    run_eager: Callable[[], Tensor] = field(repr=False)
    run_relax: Callable[[], Tensor] = field(repr=False)
    eager_ms: float = math.nan
    relax_ms: float = math.nan

    def as_dict(self) -> dict[str, Any]:
        """The numbers, as JSON can spell them."""
        names = (
            *("name", "right", "error", "exact_error", "eager_exact_error"),
            *("eager_ms", "relax_ms", "compile_seconds", "stats"),
        )
        return {name: getattr(self, name) for name in names}

    @property
    def right(self) -> bool:
        """No further from the float64 run than 4 times eager's own distance plus 1e-6."""
        return self.exact_error <= 4 * self.eager_exact_error + 1e-6


def largest_error(got: Tensor, exact: Tensor) -> float:
    """The largest absolute difference; infinite where shapes differ or a number is not one."""
    if got.shape != exact.shape:
        return math.inf
    if not got.numel():
        return 0.0
    error = (got.double() - exact.double()).abs().max().item()
    return math.inf if math.isnan(error) else error


def in_double(model: nn.Module, kwargs: dict[str, Tensor]) -> Tensor:
    """The result of a float64 copy of the network."""
    wide = pytree.tree_map(lambda x: x.double() if x.is_floating_point() else x, kwargs)
    out: Tensor = copy.deepcopy(model).double()(**wide)
    return out


@torch.no_grad()
def compile_and_check(
    name: str,
    build: Callable[[], tuple[nn.Module, dict[str, Tensor]]],
    step: Callable[[str], None] = lambda message: None,
) -> Row:
    """Build, run in eager and in float64, compile, and compare.

    Args:
        name: the network's name.
        build: gives the network in evaluation mode, and its arguments by name.
        step: told what begins.
    """
    step(f"{name}: build")
    model, kwargs = build()
    step(f"{name}: eager and float64")
    eager, exact = model(**kwargs), in_double(model, kwargs)
    step(f"{name}: compile")
    compiled = torch.compile(model, backend="relax", fullgraph=True)
    fx2relax.reset_stats()
    start = time.perf_counter()
    ours = compiled(**kwargs)
    seconds = time.perf_counter() - start
    return Row(
        name=name,
        eager=eager,
        ours=ours,
        error=largest_error(ours, eager),
        exact_error=largest_error(ours, exact),
        eager_exact_error=largest_error(eager, exact),
        stats=fx2relax.stats(),
        compile_seconds=seconds,
        run_eager=lambda: model(**kwargs),
        run_relax=lambda: compiled(**kwargs),
    )


@torch.no_grad()
def time_calls(row: Row, budget: float = 3.0) -> None:
    """Fill in the two medians.

    Args:
        row: what `compile_and_check` gave.
        budget: seconds, more or less.
    """
    times = time_in_turns((row.run_eager, row.run_relax), budget)
    row.eager_ms, row.relax_ms = (1000 * statistics.median(taken) for taken in times)


def time_in_turns(
    sides: Sequence[Callable[[], Any]], budget: float, step: Callable[[], None] = lambda: None
) -> list[list[float]]:
    """The seconds of calls that alternate, so that all sides see the machine in the same state.

    Args:
        sides: what is called; each is called a few times before, so that it has settled.
        budget: seconds, more or less.
        step: called between rounds.
    """
    times: list[list[float]] = [[] for _ in sides]
    for count in range(2 + SETTLED):
        if count == 2:  # by now what is compiled in the background has begun
            fx2relax.wait_for_compilation()
        for run in sides:
            run()
        step()
    end = time.perf_counter() + budget
    order = list(range(len(sides)))
    while len(times[0]) < 5 or (time.perf_counter() < end and len(times[0]) < 200):
        for place in order:
            start = time.perf_counter()
            sides[place]()
            times[place].append(time.perf_counter() - start)
        order = [*order[1:], order[0]]  # who comes after whom is nobody's advantage
        step()
    return times
