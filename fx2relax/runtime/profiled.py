"""What `torch.profiler` shows of a program: its kernels, by the nodes that each computes.

A virtual machine that tells of its calls is another one than that of calls nobody looks at, which
takes as long as if there were no profiler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import profiler

#: Its `_is_profiler_enabled` says whether a profiler runs.
PROFILER = profiler
_record = torch._C._profiler._RecordFunctionFast


class Profiled:
    """A program's virtual machines while a profiler runs.

    Args:
        make: makes the way into a virtual machine, see `program.Entry`.
        names: what the function calls, in order: the symbol, and what is shown for it.
    """

    def __init__(self, make: Callable[[], Any], names: Sequence[tuple[str, str]]) -> None:
        self._make, self._names = make, names
        self._threads = threading.local()

    @property
    def own(self) -> Any:
        """The way into this thread's machine, whose calls show what they call."""
        found = getattr(self._threads, "own", None)
        if found is None:
            found, shown = self._make(), _Shown(self._names)
            found.machine["set_instrument"](shown)
            found.main = shown.around(found.main)
            self._threads.own = found
        return found


def alone(kernel: Callable[..., None], names: Sequence[tuple[str, str]]) -> Callable[..., None]:
    """A kernel that is called past the virtual machine, while a profiler runs."""
    name = names[0][1] if names else "kernel"

    def call(*arguments: Any) -> None:
        with _record(name):
            kernel(*arguments)

    return call


class _Shown:
    """Takes what a virtual machine tells of each call."""

    def __init__(self, names: Sequence[tuple[str, str]]) -> None:
        self._names = names
        self._left: dict[str, Iterator[str]] = {}
        self._open: list[Any] = []

    def around(self, main: Callable[..., Any]) -> Callable[..., Any]:
        """A function, whose calls of others are shown."""

        def call(*arguments: Any) -> Any:
            self.begin()
            try:
                return main(*arguments)
            finally:
                self.end()

        return call

    def begin(self) -> None:
        places: dict[str, list[str]] = {}
        for symbol, name in self._names:
            places.setdefault(symbol, []).append(name)
        self._left = {symbol: iter(names) for symbol, names in places.items()}

    def end(self) -> None:
        while self._open:  # where a call has failed, nothing tells of its end
            self._close()

    def _close(self) -> None:
        last = self._open.pop()
        if last is not None:
            last.__exit__(None, None, None)

    def __call__(self, function: Any, symbol: str, before: bool, result: Any, *args: Any) -> int:
        if not before:
            self._close()
            return 0
        name = next(self._left.get(symbol, iter(())), None)
        entered = None
        if name is not None:
            entered = _record(name)
            entered.__enter__()
        self._open.append(entered)
        return 0  # go on
