"""Takes notes while a model is compiled: graphs, modules at each stage, seconds."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fx2relax.explaining.lines import line_of_caller
from fx2relax.explaining.report import Line
from fx2relax.stages import Observer


class Watch:
    """A program's call, timed while that is wanted.

    Attributes:
        on: whether it is.
        seconds: of all calls since it was set to nothing.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self.on = False
        self.seconds = 0.0

    def __call__(self, arguments: Any) -> Any:
        if not self.on:
            return self._call(arguments)
        start = time.perf_counter()
        try:
            return self._call(arguments)
        finally:
            self.seconds += time.perf_counter() - start


@dataclass
class Variant:
    """One program of a graph.

    Attributes:
        library: "torch", "generated" or "none", as `pipeline.lower` takes it.
        legal: the module before its kernels were grouped, `grouped` after that.
        lowered: what `pipeline.lower` returned.
        ready: what machine code was made of.
        program: what runs it.
        watch: what is called in its place.
        symbols: what its function calls, in order; filled in by whoever follows the nodes.
    """

    library: str
    legal: Any
    grouped: Any
    lowered: Any
    ready: Any
    program: Any = None
    watch: Watch | None = None
    symbols: list[str] = field(default_factory=list)


@dataclass
class GraphNotes:
    """What was seen of one ATen graph.

    Attributes:
        phase: "inference", "forward" or "backward".
        graph: the graph.
        specs: its inputs.
        imported: the note of the importer; None where the import failed.
        variants: the programs, in the order in which they were made.
        seconds: by stage.
        alternatives: the programs that were timed against each other, if they were.
        contest: times them against eager, if anything does.
        error: why it runs in PyTorch, if it does.
        caller: the user's line that asked for the notes.
    """

    phase: str
    graph: Any
    specs: list[Any]
    imported: dict[str, Any] | None = None
    variants: list[Variant] = field(default_factory=list)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    alternatives: Any = None
    contest: Any = None
    error: Exception | None = None
    caller: Line = field(default_factory=Line)

    @property
    def chosen(self) -> Variant | None:
        """The program that runs; None where PyTorch does."""
        if not self.variants or self.error is not None:
            return None
        if self.alternatives is not None:
            wanted = self.alternatives.current
            return next((v for v in self.variants if v.library == wanted), self.variants[0])
        return self.variants[0]


class Recorder(Observer):
    """An observer of `fx2relax.stages`."""

    def __init__(self) -> None:
        self.captured: list[Any] = []
        self.graphs: list[GraphNotes] = []
        self.untraced: list[tuple[Any, Exception]] = []
        self._caller = line_of_caller()
        self._stages: dict[str, Any] = {}
        self._kept: dict[str, Callable[..., None]] = {
            "imported": self._imported,
            "time": self._time,
            "legal": lambda mod: self._stages.update(legal=mod),
            "grouped": lambda mod: self._stages.update(grouped=mod),
            "lowered": self._lowered,
            "program": self._program,
            "compiled": self._compiled,
            "contest": self._contest,
            "failed": self._failed,
        }

    def note(self, stage: str, what: dict[str, Any]) -> None:
        """Keep what reports are made of."""
        if stage == "captured":
            self.captured.append(what["graph"])
        elif stage == "untraced":
            self.untraced.append((what["graph"], what["error"]))
        elif stage == "graph":
            notes = GraphNotes(what["phase"], what["graph"], what["specs"], caller=self._caller)
            self.graphs.append(notes)
        elif self.graphs:
            keep = self._kept.get(stage)
            if keep is not None:
                keep(**what)

    def wrap(self, call: Any, what: dict[str, Any]) -> Any:
        """A call that can be timed."""
        watch = Watch(call)
        for variant in self.graphs[-1].variants[-1:]:
            variant.watch = watch
        return watch

    @property
    def settled(self) -> bool:
        """Whether it is known which program of each graph runs."""
        found = [notes.alternatives for notes in self.graphs]
        return all(alternatives is None or alternatives.settled for alternatives in found)

    def _imported(self, **what: Any) -> None:
        # Work on numbers alone is compiled while a graph is imported.
        if what["graph"] is self.graphs[-1].graph:
            self.graphs[-1].imported = what

    def _time(self, of: str, seconds: float) -> None:
        self.graphs[-1].seconds[of] += seconds

    def _lowered(self, mod: Any, ready: Any, library: str, name: str) -> None:
        variant = Variant(library, self._stages["legal"], self._stages["grouped"], mod, ready)
        self.graphs[-1].variants.append(variant)

    def _program(self, program: Any, built: Any) -> None:
        if self.graphs[-1].variants:
            self.graphs[-1].variants[-1].program = program

    def _compiled(self, seconds: float, alternatives: Any) -> None:
        self.graphs[-1].alternatives = alternatives
        self.graphs[-1].seconds["all"] += seconds

    def _contest(self, contest: Any) -> None:
        self.graphs[-1].contest = contest

    def _failed(self, error: Exception) -> None:
        self.graphs[-1].error = error
