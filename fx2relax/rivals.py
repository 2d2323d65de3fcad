"""The programs of one graph: products in PyTorch's kernels or in generated ones, tuned or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.fx

from fx2relax import background, drafts, programs
from fx2relax.alternatives import HEAVY, Alternatives, Call
from fx2relax.never_slower import Verdicts
from fx2relax.options import Options
from fx2relax.params import InputSpec
from fx2relax.runtime.heap import leaves_room_for

#: The programs' names, as verdicts are stored under; also what `pipeline.lower` calls them.
LIBRARY, GENERATED = "torch", "generated"


@dataclasses.dataclass
class Entered:
    """The programs that run in turns until one is known to be the fastest.

    Attributes:
        built: the one that is there from the start.
        alternatives: all of them.
        verdicts: what is known of them.
    """

    built: drafts.Built
    alternatives: Alternatives
    verdicts: Verdicts


@dataclasses.dataclass
class Awaited:
    """Programs of which another process compiles the first.

    Attributes:
        verdicts: what is known of them.
        entered: waits for them; it may be called again where it raised.
    """

    verdicts: Verdicts
    entered: Callable[[], Entered]


def enter(
    graph: torch.fx.GraphModule,
    specs: Sequence[InputSpec],
    options: Options,
    callable_of: Callable[[drafts.Built], Call],
) -> Entered:
    """Compile a graph in one way, and find out in which others it may be faster.

    Args:
        graph: see `programs.build`.
        specs: the same.
        options: the backend's.
        callable_of: what runs a program.

    Raises:
        what `programs.build` raises.
    """
    if options.tune is None:
        return _waited_for(begin(graph, specs, options, callable_of))
    from fx2relax import tuned_programs  # and with it the compiler

    ways = [with_library(options).library, *([GENERATED] if options.library == "auto" else [])]
    tuning = tuned_programs.plan(graph, specs, options, ways, callable_of)
    if tuning is None:
        return _waited_for(begin(graph, specs, options, callable_of))
    found = tuning.found()
    if found is not None:
        name, built = found
        return Entered(built, Alternatives({name: callable_of(built)}), tuning.verdicts)
    entered = _waited_for(begin(graph, specs, options, callable_of))
    if tuning.lost:
        return entered
    tuning.prepare(entered.built.draft)
    entered.alternatives.later = tuning
    return entered


def _waited_for(begun: Entered | Awaited) -> Entered:
    return begun.entered() if isinstance(begun, Awaited) else begun


def begin(
    graph: torch.fx.GraphModule,
    specs: Sequence[InputSpec],
    options: Options,
    callable_of: Callable[[drafts.Built], Call],
) -> Entered | Awaited:
    """`enter` without tuning, and without waiting for another process.

    Args:
        graph: see `enter`, as for the others.
        specs: the same.
        options: the same.
        callable_of: the same.

    Raises:
        what `programs.build` raises.
    """
    usual = with_library(options)
    place = programs.place(graph, specs, usual)
    verdicts = Verdicts(*place)
    generated = dataclasses.replace(options, library=GENERATED)
    open_to_both = options.library == "auto"
    known = verdicts.known.get("()")
    if open_to_both and known == GENERATED:
        kept = programs.find(graph, specs, programs.place(graph, specs, generated))
        if kept is not None:
            return Entered(kept, Alternatives({GENERATED: callable_of(kept)}), verdicts)

    def entered(first: drafts.Built) -> Entered:
        ways = {LIBRARY: callable_of(first)}
        calls = first.census["library_calls"]
        if (
            not open_to_both
            or not calls
            or known not in (None, GENERATED)
            or _reads_alone(first)
            or not leaves_room_for(first.imported.weight_bytes)
        ):
            return Entered(first, Alternatives(ways), verdicts)
        second = programs.another(graph, specs, generated, first.draft)

        def made(checkpoint: Callable[[], None] = background.checkpoint) -> Call | None:
            built = second(checkpoint) if callable(second) else second
            return callable_of(built) if built.census["library_calls"] < calls else None

        job = background.Job(made, "generated kernels are not tried")
        if not callable(second) or not background.enabled():
            job.run()
        return Entered(first, Alternatives(ways, (GENERATED, job)), verdicts)

    begun = programs.begin(graph, specs, usual, place)
    if callable(begun):
        return Awaited(verdicts, lambda: entered(begun()))
    return entered(begun)


def _reads_alone(program: drafts.Built) -> bool:
    """Whether all that a library does in a program is to read large weights for a few rows each.

    Generated kernels would take as long, and hold each weight a second time.
    """
    large = program.imported.weight_bytes >= HEAVY
    return large and program.census["library_calls"] == program.census["reads"]


def with_library(options: Options) -> Options:
    """Options for the program that is there from the start."""
    if options.library != "auto":
        return options
    return dataclasses.replace(options, library=LIBRARY)
