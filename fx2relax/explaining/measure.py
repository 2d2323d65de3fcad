"""Seconds of each kernel of a program, and what the machine could do."""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from fx2relax.collectives import processes
from fx2relax.explaining.recorder import GraphNotes, Recorder, Variant
from fx2relax.explaining.report import Data, Limits

_LEAST, _MOST = 5, 500


class _Spans:
    """What a virtual machine tells of each call: the symbol, the start and the end."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, int, int]] = []
        self._start = 0

    def __call__(self, function: Any, symbol: str, before: bool, result: Any, *args: Any) -> int:
        if before:
            self._start = time.perf_counter_ns()
        else:
            self.spans.append((symbol, self._start, time.perf_counter_ns()))
        return 0  # go on


def measure(data: Data, recorder: Recorder, call: Callable[[], Any], seconds: float) -> None:
    """Fill in the times of a report: those of the programs, where eager is faster too.

    Args:
        data: the report's; it is changed.
        recorder: it looked on while the model was compiled.
        call: calls the model once.
        seconds: how long to measure, about.
    """
    watched: list[tuple[int, GraphNotes, Variant]] = []
    for number, notes in enumerate(recorder.graphs):
        chosen = notes.chosen
        if chosen is not None and chosen.program is not None:
            watched.append((number, notes, chosen))
    with ExitStack() as stack:
        for notes in recorder.graphs:
            if notes.contest is not None:
                stack.enter_context(notes.contest.program_alone())
        spans = [_Spans() for _ in watched]
        for listener, (_, _, variant) in zip(spans, watched, strict=True):
            stack.enter_context(variant.program.watched(listener))
        rounds = _rounds(call, spans, seconds)
    # What else the machine does shows in some calls; the others tell what this one takes.
    rounds.sort(key=lambda one: one.seconds)
    rounds = rounds[: max(_LEAST, len(rounds) // 2)]
    data.call = statistics.fmean(one.seconds for one in rounds)
    for place, (number, notes, variant) in enumerate(watched):
        graph = data.graphs[number]
        own = [one.spans[place] for one in rounds]
        if variant.program.direct:
            taken = [_alone(notes, variant, seconds / 10)]
        else:
            taken = _taken(variant, own)
            whole = [calls[-1][2] - calls[0][1] for calls in own if calls]
            graph.measured = statistics.fmean(whole) * 1e-9 if whole else None
        for kernel, spent in zip(graph.kernels, taken, strict=True):
            kernel.seconds = spent
        inside = sum(k.seconds or 0.0 for k in graph.kernels)
        if graph.measured is not None:
            graph.outside = max(0.0, graph.measured - inside)
    inside = sum(k.seconds or 0.0 for k in data.kernels)
    data.outside = max(0.0, data.call - inside)
    data.limits = limits(torch.get_num_threads())


@dataclass
class _Round:
    """One call of the model: its seconds, and the spans of each program."""

    seconds: float
    spans: list[list[tuple[str, int, int]]]


def _rounds(call: Callable[[], Any], spans: list[_Spans], seconds: float) -> list[_Round]:
    rounds: list[_Round] = []
    end = time.perf_counter() + seconds
    most = _MOST if processes() == 1 else _LEAST  # all processes call it as often
    while len(rounds) < _LEAST or (time.perf_counter() < end and len(rounds) < most):
        for own in spans:
            own.spans.clear()
        start = time.perf_counter()
        call()
        taken = time.perf_counter() - start
        rounds.append(_Round(taken, [list(own.spans) for own in spans]))
    return rounds


def _taken(variant: Variant, rounds: list[list[tuple[str, int, int]]]) -> list[float]:
    """The mean seconds of each call of a program, in order."""
    known = set(variant.symbols)
    each: list[list[int]] = [[] for _ in variant.symbols]
    for spans in rounds:
        waiting: dict[str, list[int]] = defaultdict(list)
        for symbol, start, end in spans:
            if symbol in known:
                waiting[symbol].append(end - start)
        for place, symbol in enumerate(variant.symbols):
            if waiting[symbol]:
                each[place].append(waiting[symbol].pop(0))
    return [statistics.fmean(times) * 1e-9 if times else 0.0 for times in each]


def _alone(notes: GraphNotes, variant: Variant, seconds: float) -> float:
    """The seconds of a program that is one kernel, called past the virtual machine."""
    arguments = tuple(_sample(spec.val) for spec in notes.specs)
    return _median(lambda: variant.program.call(arguments), seconds)


def _sample(val: Any) -> Any:
    if not isinstance(val, torch.Tensor):
        return int(val.node.hint) if isinstance(val, torch.SymInt) else val
    sizes = [int(size) for size in val.shape]
    made = torch.empty_strided(sizes, [int(s) for s in val.stride()], dtype=val.dtype)
    return made.fill_(1)


def _median(call: Callable[[], Any], seconds: float) -> float:
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < _LEAST or (time.perf_counter() < end and len(taken) < _MOST):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


@functools.cache
def limits(threads: int) -> Limits:
    """What this machine does at best, measured: bytes copied and products in float32."""
    source = torch.ones(1 << 25)  # 128 MiB, which no cache holds
    target = torch.empty_like(source)
    moved = _best(lambda: target.copy_(source), 0.2)
    size = 1024
    left, right = torch.ones(size, size), torch.ones(size, size)
    product = torch.compile(
        torch.mm, backend="relax", options={"library": "none", "never_slower": False}
    )
    with torch.no_grad():
        ways: list[Callable[[], Any]] = [lambda: left @ right, lambda: product(left, right)]
        fastest = min(_best(way, 0.2) for way in ways)
    return Limits(2 * source.nbytes / moved, 2 * size**3 / fastest, threads)


def _best(call: Callable[[], Any], seconds: float) -> float:
    call()
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best
