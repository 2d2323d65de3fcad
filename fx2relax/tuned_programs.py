"""The tuned programs of a graph: found, or made in the background once its kernels were tuned."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.fx

from fx2relax import background, drafts, pipeline, programs, stages
from fx2relax.alternatives import Call
from fx2relax.errors import OptionError
from fx2relax.never_slower import Verdicts
from fx2relax.options import Options
from fx2relax.params import InputSpec
from fx2relax.pipeline.target import host_target
from fx2relax.tune_options import Tune
from fx2relax.tuning import session
from fx2relax.tuning.database import Database
from fx2relax.tuning.kernels import Collector, Lookup

log = logging.getLogger("fx2relax")

# The user's program runs meanwhile.
_NICE = 10


class Tuning:
    """What tunes one graph: `alternatives.Later`.

    Args:
        graph: see `programs.build`.
        specs: the same.
        options: the backend's; `tune` is not None.
        ways: what `pipeline.lower` calls the ways in which it may be lowered.
        callable_of: what runs a program.

    Attributes:
        verdicts: what is known of which program is the fastest, tuned ones among them.

    Raises:
        OSError: there can be no database.
    """

    def __init__(
        self,
        graph: torch.fx.GraphModule,
        specs: Sequence[InputSpec],
        options: Options,
        ways: Sequence[str],
        callable_of: Callable[[drafts.Built], Call],
    ) -> None:
        assert options.tune is not None
        self._graph, self._specs, self._callable_of = graph, specs, callable_of
        self._wishes = options.tune
        self._database = Database(host_target(), options.tune.database)
        self._ways = {way: dataclasses.replace(options, library=way) for way in ways}
        state = _state(options.tune, self._database)
        self._places = {
            way: programs.place(graph, specs, chosen, state) for way, chosen in self._ways.items()
        }
        self.verdicts = Verdicts(*self._places[ways[0]])
        self._draft: drafts.Draft | None = None
        self._kernels: dict[str, Collector] = {}
        self._useful: list[str] = []
        # Each begins the next; lowering and compiling are for the thread that a fork waits for.
        self._collect = background.Job(self._collected, "kernels are not tuned")
        self._tune = background.Job(self._tuned, "kernels are not tuned", waits=True)
        self._compile = background.Job(self._compiled, "tuned kernels are not tried")
        self._here = False

    def found(self) -> tuple[str, drafts.Built] | None:
        """A tuned program that is known to be the fastest, by its name."""
        for way, place in self._places.items():
            name = drafts.TUNED + way
            if self.verdicts.known.get("()") == name:
                built = programs.find(self._graph, self._specs, place)
                if built is not None:
                    return name, built
        return None

    @property
    def lost(self) -> bool:
        """Whether it is known that no tuned program is faster."""
        known = self.verdicts.known.get("()")
        return known is not None and not known.startswith(drafts.TUNED)

    def prepare(self, draft: drafts.Draft | None) -> None:
        """Take what the first program was compiled from, or import the graph.

        Raises:
            what `drafts.draft_of` raises.
        """
        first, (store, _) = next(iter(self._ways.values())), next(iter(self._places.values()))
        self._draft = draft or drafts.draft_of(self._graph, self._specs, first, store is not None)

    def start(self) -> None:
        """Tune, in the background; here, where there is none."""
        self._here = not background.enabled()
        if not self._here:
            self._collect.start()
            return
        for job in (self._collect, self._tune, self._compile):
            job.run()
            if not job.result:
                return

    @property
    def done(self) -> bool:
        """Whether there is nothing more to come."""
        jobs = (self._collect, self._tune, self._compile)
        return any(job.done and not job.result for job in jobs) or self._compile.done

    @property
    def made(self) -> Mapping[str, Call]:
        """The tuned programs by name."""
        return self._compile.result or {}

    def _tuned(self) -> bool:
        """Tune; whether there is a program to make."""
        kernels = self._kernels
        every = {key: kernel for found in kernels.values() for key, kernel in found.kernels.items()}
        target = next((found.target for found in kernels.values()), None)
        if every and self._wishes.seconds > 0:
            try:
                outcome = session.run(list(every.values()), target, self._wishes, nice=_NICE)
            except (OptionError, OSError) as error:
                log.warning("kernels are not tuned: %s", error)
                return False
            log.info(
                "%d kernels were tuned for %.1f s: %d schedules, of which %d failed",
                *(len(every), outcome.seconds, outcome.tried, outcome.failed),
            )
        lookup = Lookup(self._database.read())
        self._useful = [way for way, found in kernels.items() if lookup.covers(found.kernels)]
        if not self._useful:
            # Nothing is faster than what there is, and the next process need not look again.
            self.verdicts.add("()", "untuned")
            self._draft = None
            return False
        if not self._here:
            self._compile.start()
        return True

    def _collected(self) -> bool:
        """Find the kernels of each way; whether there are any."""
        draft = self._draft
        assert draft is not None
        imported = draft.imported
        for way in self._ways:
            background.checkpoint()
            found = Collector()
            with stages.observed(found):
                lifted = imported.num_input < len(imported.params)
                pipeline.lower(imported.mod, library=way, lift_weights=lifted)
            keys = found.kernels.keys()
            if all(keys != other.kernels.keys() for other in self._kernels.values()):
                self._kernels[way] = found
        if not any(found.kernels for found in self._kernels.values()):
            self._draft = None
            return False
        if not self._here:
            self._tune.start()
        return True

    def _compiled(self) -> dict[str, Call]:
        made: dict[str, Call] = {}
        draft, self._draft = self._draft, None
        assert draft is not None
        for way in self._useful:
            lookup = Lookup(self._database.read())
            built = draft.compile(
                way, *self._places[way], workers=1, checkpoint=background.checkpoint, known=lookup
            )
            built.draft = None
            if lookup.used:
                made[drafts.TUNED + way] = self._callable_of(built)
        return made


def _state(wishes: Tune, database: Database) -> str:
    """What decides which schedules a tuned program has.

    Where nothing is tuned it is what the database holds; else how long it was tuned, and where that
    is written down: what other graphs add to it meanwhile does not make this program another one.
    """
    if wishes.seconds == 0:
        return f"known {database.state()}"
    return f"{wishes.seconds} {database.path}"


def plan(
    graph: torch.fx.GraphModule,
    specs: Sequence[InputSpec],
    options: Options,
    ways: Sequence[str],
    callable_of: Callable[[drafts.Built], Call],
) -> Tuning | None:
    """What tunes a graph where that is wanted and can be; None elsewhere."""
    if options.tune is None or any(isinstance(s.val, torch.SymInt) for s in specs):
        return None
    try:
        return Tuning(graph, specs, options, ways, callable_of)
    except OSError as error:
        log.warning("kernels are not tuned: %s", error)
        return None
