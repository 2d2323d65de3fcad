"""Programs that compute the same in different ways, of which one runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fx2relax.runtime.heap import give_back

Call = Callable[[Sequence[Any]], Any]


class Alternatives:
    """Programs of one graph.

    Args:
        programs: by name; the first one runs until another is chosen.
    """

    def __init__(self, programs: Mapping[str, Call]) -> None:
        self._programs = dict(programs)
        self._current = next(iter(self._programs.values()))

    @property
    def names(self) -> list[str]:
        """The programs' names, that of the first choice first."""
        return list(self._programs)

    def use(self, name: str) -> None:
        """Let a program run from now on; one that is not there leaves all as it is."""
        self._current = self._programs.get(name, self._current)

    def keep(self, name: str) -> None:
        """Let one run for good, and let go of the others and what they hold of the weights."""
        self.use(name)
        if name in self._programs:
            self._programs = {name: self._programs[name]}
            give_back()

    def call(self, arguments: Sequence[Any]) -> Any:
        """Run the chosen one."""
        return self._current(arguments)
