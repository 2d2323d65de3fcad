"""A graph whose calls are made once runs in the faster of its programs: its first calls take turns.

That is a graph that leaves a trace (it writes to a cache, it draws random numbers), and each graph
of a training step: what it gives is kept for the gradients, so that a second result would take as
much memory again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fx2relax.alternatives import Alternatives
from fx2relax.clocks import Clock
from fx2relax.devices import CPU
from fx2relax.locks import own
from fx2relax.never_slower import SETTLED, SIZES, Verdicts, verdict

# As many calls as a verdict needs, and one that does not count.
_IN_A_ROW = SETTLED


class Turns:
    """The programs of one graph as a function of a tuple of arguments.

    Args:
        alternatives: the programs; the first one runs until another is there.
        verdicts: what is known of them already.
        clock: of the device that they run on.
    """

    def __init__(
        self, alternatives: Alternatives, verdicts: Verdicts, clock: Clock | None = None
    ) -> None:
        self._clock = clock or Clock(CPU)
        self._alternatives, self._verdicts = alternatives, verdicts
        self._lock = own(self, "_lock")
        self._fastest: dict[tuple[int, ...], str] = {}
        self._times: dict[tuple[int, ...], dict[str, list[float]]] = {}

    def __call__(self, arguments: Sequence[Any]) -> Any:
        """Run the graph in its fastest program, or in the one whose turn it is."""
        sizes = tuple([a for a in arguments if type(a) is int])
        fastest = self._fastest.get(sizes)
        if fastest is not None and not self._grown():
            return self._alternatives.run(fastest, arguments)
        known = self._verdicts.known.get(str(sizes))
        if known in self._alternatives.names:
            self._decide(sizes, known)
        # Another thread's calls take the cores that are timed.
        elif (
            len(self._fastest) < SIZES
            and not self._clock.stands
            and self._lock.acquire(blocking=False)
        ):
            try:
                if self._alternatives.complete():
                    return self._timed(sizes, arguments)
            finally:
                self._lock.release()
        return self._alternatives.call(arguments)

    def _grown(self) -> bool:
        """Whether there are other programs now, to be timed beside the one that runs."""
        verdicts = self._alternatives.grown()
        if verdicts is None:
            return False
        self._verdicts = verdicts
        self._fastest.clear()
        return True

    def _timed(self, sizes: tuple[int, ...], arguments: Sequence[Any]) -> Any:
        first, *others = self._alternatives.names
        if not others:
            self._decide(sizes, first)
            return self._alternatives.call(arguments)
        times = self._times.setdefault(sizes, {name: [] for name in (*others, first)})
        name = self._turn(times)
        if self._alternatives.heavy and self._alternatives.use(name):
            return self._alternatives.call(arguments)  # which makes what it needs of the weights
        seconds, result = self._clock.timed(self._alternatives.run, name, arguments)
        times[name].append(seconds)
        self._judge(sizes, first, others)
        return result

    def _turn(self, times: dict[str, list[float]]) -> str:
        """Whose turn it is: those that make much of the weights have several turns in a row."""
        behind = min(times, key=lambda way: len(times[way]))
        current = self._alternatives.current
        ahead = len(times.get(current, ())) - len(times[behind])
        return current if self._alternatives.heavy and ahead < _IN_A_ROW else behind

    def _judge(self, sizes: tuple[int, ...], first: str, others: list[str]) -> None:
        times = self._times.get(sizes)
        if times is None:  # another thread has found what is known of these sizes
            return
        if len({len(taken) for taken in times.values()}) > 1 or len(times[first]) < 2:
            return
        best = first
        for rival in others:
            # The first call of a program has more to do than the others.
            pairs = list(zip(times[best][1:], times[rival][1:], strict=True))
            beaten = verdict(pairs)
            if beaten is None:
                return
            best = rival if beaten else best
        self._verdicts.add(str(sizes), best)
        self._decide(sizes, best)

    def _decide(self, sizes: tuple[int, ...], fastest: str) -> None:
        self._times.pop(sizes, None)
        self._fastest[sizes] = fastest
        self._alternatives.use(fastest)
        # Without sizes there will never be others; with them no two are to hold much.
        if not sizes or self._alternatives.heavy:
            self._alternatives.keep(fastest)
