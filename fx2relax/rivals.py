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
        return _untuned(graph, specs, options, callable_of)[0]
    from fx2relax import tuned_programs  # and with it the compiler

    ways = [with_library(options).library, *([GENERATED] if options.library == "auto" else [])]
    tuning = tuned_programs.plan(graph, specs, options, ways, callable_of)
    if tuning is None:
        return _untuned(graph, specs, options, callable_of)[0]
    found = tuning.found()
    if found is not None:
        name, built = found
        return Entered(built, Alternatives({name: callable_of(built)}), tuning.verdicts)
    entered, draft = _untuned(graph, specs, options, callable_of)
    if tuning.lost:
        return entered
    tuning.prepare(draft)
    entered.alternatives.later = tuning
    return entered


def _untuned(
    graph: torch.fx.GraphModule,
    specs: Sequence[InputSpec],
    options: Options,
    callable_of: Callable[[drafts.Built], Call],
) -> tuple[Entered, drafts.Draft | None]:
    """`enter` without tuning, and what the first program was compiled from, if it was."""
    usual = with_library(options)
    place = programs.place(graph, specs, usual)
    verdicts = Verdicts(*place)
    generated = dataclasses.replace(options, library=GENERATED)
    open_to_both = options.library == "auto"
    known = verdicts.known.get("()")
    if open_to_both and known == GENERATED:
        kept = programs.find(graph, specs, programs.place(graph, specs, generated))
        if kept is not None:
            only = Alternatives({GENERATED: callable_of(kept)})
            return Entered(kept, only, verdicts), None
    first = programs.build(graph, specs, usual, place)
    ways = {LIBRARY: callable_of(first)}
    calls = first.census["library_calls"]
    if (
        not open_to_both
        or not calls
        or known not in (None, GENERATED)
        or _reads_alone(first)
        or not leaves_room_for(first.imported.weight_bytes)
    ):
        return Entered(first, Alternatives(ways), verdicts), first.draft
    second = programs.another(graph, specs, generated, first.draft)

    def made(checkpoint: Callable[[], None] = background.checkpoint) -> Call | None:
        built = second(checkpoint) if callable(second) else second
        return callable_of(built) if built.census["library_calls"] < calls else None

    job = background.Job(made, "generated kernels are not tried")
    if not callable(second) or not background.enabled():
        job.run()
    return Entered(first, Alternatives(ways, (GENERATED, job)), verdicts), first.draft


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
