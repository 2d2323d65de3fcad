"""Programs that compute the same in different ways, of which one runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from fx2relax.background import Job
from fx2relax.locks import own
from fx2relax.runtime.heap import give_back
from fx2relax.runtime.program import Program

Call = Callable[[Sequence[Any]], Any]

#: Programs that make something else of so many bytes of weights do not hold it beside each other.
HEAVY = 32 << 20


class Later(Protocol):
    """Programs that are made once it is known which of the others is the fastest."""

    #: What is remembered of which is the fastest, when these are among them.
    verdicts: Any

    def start(self) -> None:
        """Begin, in the background."""

    @property
    def done(self) -> bool:
        """Whether they are made, or cannot be."""

    @property
    def made(self) -> Mapping[str, Call]:
        """The programs by name; none where none is better."""


class Heavy:
    """A program that makes much of the weights, to be held by one program of a graph at a time.

    Args:
        call: runs it.
        let_go: lets go of what it has made, until the next call makes it anew.
        trial: while it is entered, calls make nothing of the weights; they take as long as others,
            and what they return has no meaning. None where there is no such thing.
    """

    def __init__(
        self,
        call: Call,
        let_go: Callable[[], None],
        trial: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        self.call, self.let_go, self.trial = call, let_go, trial

    @classmethod
    def of(cls, program: Program, call: Call) -> Heavy:
        """A program, called as those who look on want it to be."""
        # They are to see no call that has no meaning.
        alone = call is program.call and program.can_stand_in
        return cls(call, program.forget, program.standing_in if alone else None)

    def __call__(self, arguments: Sequence[Any]) -> Any:
        return self.call(arguments)


class Alternatives:
    """Programs of one graph.

    Args:
        programs: by name; the first one runs until another is chosen.
        missing: the name of one more, and the job that makes it, or None in its place.

    Attributes:
        later: what makes others once one of these was kept; None where nothing does.
    """

    def __init__(
        self, programs: Mapping[str, Call], missing: tuple[str, Job] | None = None
    ) -> None:
        self.later: Later | None = None
        self._programs = dict(programs)
        self._current = next(iter(self._programs.values()))
        self._missing = missing
        self._asked = False
        self._awaited: Callable[[], Alternatives] | None = None
        self._lock = own(self, "_lock")
        self._adopt()

    @classmethod
    def awaited(cls, made: Callable[[], Alternatives]) -> Alternatives:
        """Programs that are still compiled.

        Args:
            made: waits for them; it is called again where it raised.
        """

        def first(arguments: Sequence[Any]) -> Any:
            ways.arrive()
            return ways.call(arguments)

        ways = cls({"": first})
        ways._awaited = made
        return ways

    def arrive(self) -> None:
        """Wait for programs that are still compiled."""
        if self._awaited is None:
            return
        with self._lock:
            if self._awaited is None:  # another thread has waited
                return
            made = self._awaited()
            self.later, self._programs, self._missing = made.later, made._programs, made._missing
            self._current = made._current
            self._awaited = None

    @property
    def names(self) -> list[str]:
        """The programs' names, that of the first choice first."""
        return list(self._programs)

    @property
    def current(self) -> str:
        """The name of the one that runs."""
        return next(name for name, call in self._programs.items() if call is self._current)

    def complete(self) -> bool:
        """Whether there is no other to come.

        The one that is missing is begun when this is asked for the second time: what runs once is
        not worth it.
        """
        if self._missing is not None and self._asked:
            self._missing[1].start()
        self._asked = True
        return self._adopt()

    def _adopt(self) -> bool:
        """Take the one that was missing if it is made; whether none is missing now."""
        if self._missing is not None:
            name, job = self._missing
            if not job.done:
                return False
            if job.result is not None:
                self._programs[name] = job.result
            self._missing = None
        return True

    @property
    def settled(self) -> bool:
        """Whether one runs for good, or there is no other."""
        return len(self._programs) == 1 and self._missing is None

    @property
    def heavy(self) -> bool:
        """Whether not all may hold what they make of the weights."""
        return any(isinstance(call, Heavy) for call in self._programs.values())

    def use(self, name: str) -> bool:
        """Let a program run from now on; one that is not there leaves all as it is.

        Returns:
            whether its next call has much to make of the weights first.
        """
        before, self._current = self._current, self._programs.get(name, self._current)
        if self._current is before:
            return False
        if isinstance(before, Heavy):
            before.let_go()
        return isinstance(self._current, Heavy)

    @property
    def on_trial(self) -> list[str]:
        """Programs besides the first one that can run before they make much of the weights."""
        _, *others = self._programs.items()
        return [name for name, call in others if isinstance(call, Heavy) and call.trial]

    @contextmanager
    def trial(self, name: str) -> Iterator[None]:
        """Let this thread's calls run one of `on_trial`, see `Heavy`; those of others go on."""
        program, before, here = self._programs[name], self._current, threading.get_ident()
        assert isinstance(program, Heavy)
        assert program.trial is not None

        def either(arguments: Sequence[Any]) -> Any:
            return (program if threading.get_ident() == here else before)(arguments)

        with program.trial():
            self._current = either
            try:
                yield
            finally:
                self._current = before

    def drop(self, name: str) -> None:
        """Let go of a program that does not run."""
        del self._programs[name]

    def keep(self, name: str) -> None:
        """Let one run for good, and let go of the others and what they hold of the weights."""
        self.use(name)
        self._missing = None
        if name in self._programs:
            kept = self._current
            self._current = kept.call if isinstance(kept, Heavy) else kept
            self._programs = {name: self._current}
            give_back()
        if self.later is not None:
            self.later.start()

    def grown(self) -> Any:
        """Take in what was made later, once: its verdicts, or None where there is nothing new."""
        later = self.later
        if later is None or not later.done:
            return None
        self.later = None
        self._programs.update(later.made)
        return later.verdicts if later.made else None

    def call(self, arguments: Sequence[Any]) -> Any:
        """Run the chosen one."""
        return self._current(arguments)

    def run(self, name: str, arguments: Sequence[Any]) -> Any:
        """Run the one of this name; the chosen one if it is not there."""
        return self._programs.get(name, self._current)(arguments)
