"""Seconds of each kernel of a program, and what the machine could do."""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from fx2relax.collectives import processes
from fx2relax.explaining.recorder import GraphNotes, Recorder, Variant
from fx2relax.explaining.report import Data, Limits

_LEAST, _MOST = 5, 500
# So often calls that nobody watches take turns with those whose kernels are timed: what else the
# machine does slows down both alike.
_TURNS = 4


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
    every: list[_Plain] = []
    told: list[_Round] = []
    with ExitStack() as stack:
        for notes in recorder.graphs:
            if notes.contest is not None:
                stack.enter_context(notes.contest.program_alone())
        # What tells of kernels takes its time between them, and so calls are timed without it.
        for _ in range(_TURNS):
            every += _plain(call, [variant for _, _, variant in watched], seconds / 2 / _TURNS)
            with ExitStack() as watching:
                spans = [_Spans() for _ in watched]
                for listener, (_, _, variant) in zip(spans, watched, strict=True):
                    watching.enter_context(variant.program.watched(listener))
                told += _rounds(call, spans, seconds / 2 / _TURNS)
    plain, rounds = _best_half(every), _best_half(told)
    data.call = statistics.fmean(one.seconds for one in plain)
    telling = _telling(rounds)
    for place, (number, _, variant) in enumerate(watched):
        graph = data.graphs[number]
        graph.measured = statistics.fmean(one.programs[place] for one in plain)
        if variant.program.direct:
            taken = [graph.measured]
        else:
            taken = _taken(variant, [one.spans[place] for one in rounds], telling)
        # Kernels that were timed in slower calls do not take longer than the program.
        scale = min(1.0, graph.measured / (sum(taken) or 1.0))
        for kernel, spent in zip(graph.kernels, taken, strict=True):
            kernel.seconds = scale * spent
        inside = sum(k.seconds or 0.0 for k in graph.kernels)
        graph.outside = max(0.0, graph.measured - inside)
    data.outside = max(0.0, data.call - sum(k.seconds or 0.0 for k in data.kernels))
    programs = sum(data.graphs[number].measured or 0.0 for number, _, _ in watched)
    data.calling = min(data.outside, max(0.0, data.call - programs))
    data.limits = limits(torch.get_num_threads())
    data.measured = _said(data, len(every), len(told))


def _said(data: Data, calls: int, told: int) -> str:
    """What the times are times of, in words."""
    count = torch.get_num_threads()
    words = [
        f"A call is the mean of the faster half of {calls}, on {count} thread"
        f"{'s' if count != 1 else ''}, without compiling; kernels were timed in {told} more."
    ]
    eager = [graph.name for graph in data.graphs if graph.runs == "eager" and graph.kernels]
    if eager:
        words.append(f"The compiled program was measured where eager runs: {', '.join(eager)}.")
    if not data.kernels:
        words.append("It calls no kernels of a compiled program.")
    return " ".join(words)


@dataclass
class _Plain:
    """One call of the model: its seconds, and those of each program."""

    seconds: float
    programs: list[float]


def _plain(call: Callable[[], Any], variants: list[Variant], seconds: float) -> list[_Plain]:
    watches = [variant.watch for variant in variants if variant.watch is not None]
    assert len(watches) == len(variants)
    for watch in watches:
        watch.on = True
    rounds: list[_Plain] = []

    def timed() -> None:
        for watch in watches:
            watch.seconds = 0.0
        start = time.perf_counter()
        call()
        taken = time.perf_counter() - start
        rounds.append(_Plain(taken, [watch.seconds for watch in watches]))

    _repeat(timed, seconds)
    for watch in watches:
        watch.on = False
    return rounds


def _best_half(rounds: list[_Timed]) -> list[_Timed]:
    """The faster ones: what else the machine does shows in the others."""
    ordered = sorted(rounds, key=lambda one: one.seconds)
    return ordered[: max(_LEAST, len(ordered) // 2)]


def _repeat(call: Callable[[], None], seconds: float) -> None:
    end = time.perf_counter() + seconds
    most = _MOST if processes() == 1 else _LEAST  # all processes call it as often
    turn = 0
    while turn < _LEAST or (time.perf_counter() < end and turn < most):
        call()
        turn += 1


@dataclass
class _Round:
    """One call of the model: its seconds, and the spans of each program."""

    seconds: float
    spans: list[list[tuple[str, int, int]]]


_Timed = TypeVar("_Timed", _Plain, _Round)


def _rounds(call: Callable[[], Any], spans: list[_Spans], seconds: float) -> list[_Round]:
    rounds: list[_Round] = []

    def timed() -> None:
        for own in spans:
            own.spans.clear()
        start = time.perf_counter()
        call()
        taken = time.perf_counter() - start
        rounds.append(_Round(taken, [list(own.spans) for own in spans]))

    _repeat(timed, seconds)
    return rounds


def _telling(rounds: list[_Round]) -> float:
    """Nanoseconds of a span that are the machine's telling: what the shortest of all takes."""
    spans = (span for one in rounds for own in one.spans for span in own)
    return min((end - start for _, start, end in spans), default=0.0)


def _taken(
    variant: Variant, rounds: list[list[tuple[str, int, int]]], telling: float
) -> list[float]:
    """The mean seconds of each call of a program, in order."""
    known = set(variant.symbols)
    each: list[list[float]] = [[] for _ in variant.symbols]
    for spans in rounds:
        waiting: dict[str, list[float]] = defaultdict(list)
        for symbol, start, end in spans:
            if symbol in known:
                waiting[symbol].append(end - start - telling)
        for place, symbol in enumerate(variant.symbols):
            if waiting[symbol]:
                each[place].append(waiting[symbol].pop(0))
    return [statistics.fmean(times) * 1e-9 if times else 0.0 for times in each]


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
