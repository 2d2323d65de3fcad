"""A graph runs in the fastest of its ways: its first calls are timed in each, eager among them.

The calls that are timed are the user's own, on the user's own arguments, so that only graphs are
timed that leave no trace: no write, no random draw, no other effect, nothing to differentiate. The
results that are returned are those of the compiled program until there is a verdict; or of one that
is timed beside it, where no two are to hold what they make of the weights.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from fx2relax import report
from fx2relax.alternatives import Alternatives
from fx2relax.cache import Store
from fx2relax.clocks import Clock
from fx2relax.devices import CPU
from fx2relax.locks import own
from fx2relax.ordered import is_ordered
from fx2relax.runtime.heap import give_back
from fx2relax.switches import is_on

log = logging.getLogger("fx2relax")

#: How much slower a program may be: less is noise.
MARGIN = 1.05
_ROUNDS = 5
# As many rounds are enough where the program wins each of them, and two where it wins by far.
_CLEAR = 3
_FAR = 2.0
#: After as many calls of one size, a graph runs in its fastest way.
SETTLED = _ROUNDS + 1
#: Where all values of a graph have as many bytes, eager has its turns when nothing else is held.
ROOMY = 256 << 20
# A way's turn is as many calls in a row: what a short one reads is in the processor's caches from
# the second on, as it is where the user calls in a loop; and one alone tells little of its time.
_CALLS = 12
# No other call in a turn after so many seconds.
_TURN = 5e-3
# What takes longer than this is timed twice at most.
_SECONDS = 2.0
#: Graphs of symbolic sizes are timed for so many sizes.
SIZES = 32
_NOTE = "fastest"
#: The way that is no program.
EAGER = "eager"

Function = Callable[..., Any]


def enabled(option: bool) -> bool:
    """Whether calls are timed: unless the option or FX2RELAX_NEVER_SLOWER=0 forbids it."""
    return option and is_on("FX2RELAX_NEVER_SLOWER")


def leaves_no_trace(graph: torch.fx.GraphModule, mutates: bool) -> bool:
    """Whether a graph can be run twice in the place of once.

    Args:
        graph: a functional ATen graph.
        mutates: whether its caller writes to inputs once it has run.
    """
    return not mutates and not any(
        node.op == "call_function" and is_ordered(node) for node in graph.graph.nodes
    )


def is_roomy(graph: torch.fx.GraphModule) -> bool:
    """Whether the values of a graph of Dynamo's take much memory; not where sizes are symbols."""
    sizes: list[Any] = []
    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt):
            return False
        if isinstance(value, torch.Tensor) and node.op != "placeholder":
            sizes.append(value.numel() * value.element_size())
    return all(type(size) is int for size in sizes) and sum(sizes) >= ROOMY


class Verdicts:
    """Which way is the fastest for which sizes, as remembered beside a stored program."""

    def __init__(self, store: Store | None = None, key: str = "") -> None:
        self._store, self._key = store, key
        known = store.notes(key).get(_NOTE) if store is not None else None
        known = known if isinstance(known, dict) else {}
        self.known = {str(k): v for k, v in known.items() if isinstance(v, str)}

    def add(self, sizes: str, fastest: str) -> None:
        """Remember a verdict."""
        self.known[sizes] = fastest
        if self._store is not None:
            try:
                self._store.note(self._key, **{_NOTE: self.known})
            except OSError as error:
                log.info("a verdict is not stored: %s", error)


class Contest:
    """A compiled graph's function, in the fastest of its ways, and eager's where that is faster.

    Args:
        program: what was compiled of a graph that leaves no trace.
        eager: the same in PyTorch.
        nodes: how many operators it has.
        verdicts: what is known of it already.
        alternatives: the programs that `program` runs one of; None where there is one.
        clock: of the device that they run on.
        roomy: whether a call's values take much memory, which not all ways are to hold at once.
    """

    def __init__(
        self,
        program: Function,
        eager: Function,
        nodes: int,
        verdicts: Verdicts,
        alternatives: Alternatives | None = None,
        clock: Clock | None = None,
        roomy: bool = False,
    ) -> None:
        self._clock = clock or Clock(CPU)
        self._program, self._eager = program, eager
        self._nodes, self._verdicts = nodes, verdicts
        self._alternatives = alternatives or Alternatives({"program": lambda _: None})
        self._lock = own(self, "_lock")
        self._times: dict[tuple[int, ...], dict[str, list[float]]] = {}
        self._apart = roomy  # eager does not take turns with the programs
        self._fastest: dict[tuple[int, ...], str] = {}
        self._counted = False
        self._settled: Function | None = None

    def __call__(self, *arguments: Any) -> Any:
        """Run the graph one way, or each way while it is timed."""
        settled = self._settled
        if settled is not None:
            return settled(*arguments)
        sizes = tuple([a for a in arguments if type(a) is int])
        fastest = self._fastest.get(sizes)
        if fastest is None:
            return self._undecided(sizes, arguments)
        if fastest == EAGER:
            return self._in_eager(*arguments)
        self._alternatives.use(fastest)
        return self._program(*arguments)

    @property
    def in_eager(self) -> bool:
        """Whether eager is the fastest, for all sizes that were called so far."""
        return bool(self._fastest) and set(self._fastest.values()) == {EAGER}

    @contextmanager
    def program_alone(self) -> Iterator[None]:
        """Let the program run, whatever is faster."""
        settled, self._settled = self._settled, self._program
        try:
            yield
        finally:
            self._settled = settled

    def _in_eager(self, *arguments: Any) -> Any:
        report.counters.called()
        return self._eager(*arguments)

    def _made(self) -> Function:
        """Eager's own code: a `forward` read before it was made calls the module's wrappers."""
        module = getattr(self._eager, "__self__", None)
        if isinstance(module, _LazyGraphModule):
            module.real_recompile()
            self._eager = module.forward
        return self._eager

    def _undecided(self, sizes: tuple[int, ...], arguments: tuple[Any, ...]) -> Any:
        self._alternatives.arrive()
        if self._alternatives.names == [EAGER]:  # it could not be compiled
            self._settled = self._program
            return self._program(*arguments)
        known = self._verdicts.known.get(str(sizes))
        if known is not None and known in (EAGER, *self._alternatives.names):
            self._decide(sizes, known)
            return self(*arguments)
        if len(self._fastest) >= SIZES:
            return self._program(*arguments)
        watched = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
        # Others that watch PyTorch's calls would see each of them twice; another thread's calls
        # take the cores that are timed.
        if watched or self._clock.stands or not self._lock.acquire(blocking=False):
            return self._program(*arguments)
        try:
            if not self._alternatives.complete():
                return self._program(*arguments)
            return self._timed(sizes, arguments)
        finally:
            self._lock.release()

    def _timed(self, sizes: tuple[int, ...], arguments: tuple[Any, ...]) -> Any:
        first = self._alternatives.names[0]
        try:
            if sizes not in self._times:
                self._times[sizes] = {}
                self._sift(arguments)
                if not self._alternatives.heavy:
                    _, *others = self._alternatives.names
                    for name in (*others, first):  # the first call prepares weights
                        self._alternatives.use(name)
                        result = self._program(*arguments)
                    return result
            times = self._times[sizes]
            result = self._round(times, arguments)
            fastest = self._verdict(times)
            if fastest is not None and self._apart:
                self._eager_in_a_row(times, arguments)
                fastest = self._verdict(times)
        except Exception:
            # Whatever one way has against these arguments, or this graph: the first has to say.
            self._alternatives.use(first)
            self._decide(sizes, first)
            return self._program(*arguments)
        finally:
            if not self._alternatives.heavy:
                self._alternatives.use(first)
        if fastest is not None:
            self._verdicts.add(str(sizes), fastest)
            self._decide(sizes, fastest)
        return result

    def _round(self, times: dict[str, list[float]], arguments: tuple[Any, ...]) -> Any:
        """Give each way a turn that may yet be the fastest; the first one's result."""
        ways = self._whose_turn(times)
        # Whoever comes first finds the arguments out of the cache.
        turn = len(times.get(ways[0], ())) % len(ways)
        for name in (*ways[turn:], *ways[:turn]):
            seconds, made = self._run(name, arguments)
            times.setdefault(name, []).append(seconds)
            if name == ways[0]:
                result = made
        return result

    def _whose_turn(self, times: dict[str, list[float]]) -> list[str]:
        """The ways of a round, programs first."""
        first, *others = self._alternatives.names
        ways = [first, *(name for name in others if self._beaten(first, name, times) is not False)]
        if self._in_rows:
            ways = [name for name in ways if len(times.get(name, ())) < _CLEAR][:1] or [first]
        if self._apart or ways[0] != first or self._beaten(first, EAGER, times) is False:
            return ways
        return [*ways, EAGER]

    def _sift(self, arguments: tuple[Any, ...]) -> None:
        """Drop programs that would make much of the weights, and that lose before they do."""
        alternatives = self._alternatives
        for name in alternatives.on_trial:
            own = self._least(2, arguments)
            try:
                with alternatives.trial(name):
                    rival = self._least(3, arguments)  # the first call takes memory for values
            except Exception as error:  # what stands in for weights may be out of place
                log.info("%s kernels have no trial: %s", name, error)
                continue
            if rival >= own:
                alternatives.drop(name)

    def _least(self, calls: int, arguments: tuple[Any, ...]) -> float:
        """The seconds of the fastest of so many calls; the first one's if these are many."""
        least, _ = self._clock.timed(self._program, *arguments)
        for _ in range(calls - 1 if least <= _SECONDS else 0):
            least = min(least, self._clock.timed(self._program, *arguments)[0])
        return least

    def _eager_in_a_row(self, times: dict[str, list[float]], arguments: tuple[Any, ...]) -> None:
        """Give eager as many turns as the first program had, while none has memory for values.

        Where that leaves the verdict open, eager takes part in the rounds that follow.
        """
        self._apart = False
        give_back()
        seconds, _ = self._run(EAGER, arguments)
        turns = times[EAGER] = []
        for _ in times[self._alternatives.names[0]]:
            if seconds <= _SECONDS:  # the first call has taken memory as well
                seconds, _ = self._run(EAGER, arguments)
            turns.append(seconds)
        give_back()

    def _run(self, name: str, arguments: tuple[Any, ...]) -> tuple[float, Any]:
        if self._alternatives.use(name):
            self._program(*arguments)  # which makes what it needs of the weights
        function = self._made() if name == EAGER else self._program
        taken: list[float] = []
        while len(taken) < _CALLS and sum(taken) < _TURN:
            seconds, result = self._clock.timed(function, *arguments)
            taken.append(seconds)
        return statistics.median_low(taken), result

    def _until_grown(self, settled: Function) -> Function:
        """What runs until there are other programs; these are then timed beside it."""

        def call(*arguments: Any) -> Any:
            if self._alternatives.later is None:  # there will be no other
                self._settled = settled
            verdicts = self._alternatives.grown()
            if verdicts is None:
                return settled(*arguments)
            self._verdicts = verdicts
            self._fastest.clear()
            self._settled = None
            return self(*arguments)

        return call

    def _verdict(self, times: dict[str, list[float]]) -> str | None:
        """The fastest of the ways that are timed; None while it is open."""
        first, *others = self._alternatives.names
        if self._apart and len(times[first]) < _CLEAR and times[first][0] <= _SECONDS:
            return None
        best = first
        for rival in others if self._apart else (*others, EAGER):
            if self._beaten(first, rival, times) is False:
                continue
            beaten = self._beaten(best, rival, times)
            if beaten is None:
                return None
            best = rival if beaten else best
        return best

    def _beaten(self, own: str, rival: str, times: dict[str, list[float]]) -> bool | None:
        """Whether one way is slower than another; None while it is open."""
        pairs = list(zip(times.get(own, ()), times.get(rival, ()), strict=False))
        beaten = verdict(pairs) if pairs else None
        enough = self._in_rows and len(pairs) >= _CLEAR
        return _lost(pairs) if beaten is None and enough else beaten

    @property
    def _in_rows(self) -> bool:
        """Whether rounds of one program come in a row: each change makes much of the weights."""
        return self._alternatives.heavy and len(self._alternatives.names) > 1

    def _decide(self, sizes: tuple[int, ...], fastest: str) -> None:
        times = self._times.pop(sizes, {})
        self._fastest[sizes] = fastest
        names = self._alternatives.names
        if sizes and self._alternatives.heavy and fastest in names:
            self._alternatives.keep(fastest)  # no two are to hold much
        if not sizes:  # nor will there ever be others
            self._alternatives.keep(fastest if fastest in names else names[0])
            settled = self._in_eager if fastest == EAGER else self._program
            waits = self._alternatives.later is not None
            self._settled = self._until_grown(settled) if waits else settled
        if fastest != EAGER:
            return
        self._made()
        if not self._counted:
            self._counted = True
            report.counters.count("graphs_slower")
        own = self._alternatives.names[0]
        log.info(
            "a graph of %d operators%s runs in eager, which is faster%s",
            self._nodes,
            f" at the sizes {sizes}" if sizes else "",
            "".join(
                f"; {1e3 * theirs:.3g} ms to {1e3 * ours:.3g} ms"
                for theirs, ours in zip(times.get(EAGER, ()), times.get(own, ()), strict=False)
            ),
        )


def verdict(times: list[tuple[float, float]]) -> bool | None:
    """Whether the program is clearly slower, from (its seconds, eager's); None while it is open.

    It has to be slower by more than `MARGIN` in all rounds but one, and at its best against
    eager's best: a program that was disturbed is not taken for slow.
    """
    ours, eager = min(own for own, _ in times), min(theirs for _, theirs in times)
    if eager > _SECONDS or ours > _SECONDS:
        # Two rounds of what takes long say as much as many of what does not.
        return None if len(times) < 2 and ours > MARGIN * eager else _lost(times)
    if len(times) >= _CLEAR and all(own <= theirs for own, theirs in times):
        return False
    if len(times) >= 2 and all(_FAR * own <= theirs for own, theirs in times):
        return False
    return None if len(times) < _ROUNDS else _lost(times)


def _lost(times: list[tuple[float, float]]) -> bool:
    lost = sum(own > MARGIN * theirs for own, theirs in times)
    best = min(own for own, _ in times) > MARGIN * min(theirs for _, theirs in times)
    return best and lost >= max(len(times) - 1, 2)
