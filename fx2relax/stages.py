"""What compiling goes through, told to whoever looks on: reports, logs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any


class Observer:
    """Someone who is told of stages. What it raises ends the compilation."""

    def note(self, stage: str, what: dict[str, Any]) -> None:
        """Take notice of a stage.

        Args:
            stage: its name.
            what: objects that it has just made or is about to use; they belong to the compiler.
        """

    def wrap(self, call: Any, what: dict[str, Any]) -> Any:
        """What is called in the place of a program's `call`, a function of a tuple of arguments."""
        return call


#: Told of everything, always; they do not count as looking on.
listeners: list[Observer] = []

# Context variables reach the thread that compiles in the background.
_observers: ContextVar[tuple[Observer, ...]] = ContextVar("fx2relax_observers", default=())


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Tell an observer of all that is compiled inside."""
    token = _observers.set((*_observers.get(), observer))
    try:
        yield
    finally:
        _observers.reset(token)


def are_observed() -> bool:
    """Whether anyone looks on; what only they need is not made otherwise."""
    return bool(_observers.get())


def note(stage: str, **what: Any) -> None:
    """Tell of a stage."""
    for observer in (*listeners, *_observers.get()):
        observer.note(stage, what)


def wrapped(call: Any, **what: Any) -> Any:
    """A program's call, as those who look on want it to be made."""
    for observer in _observers.get():
        call = observer.wrap(call, what)
    return call


@contextmanager
def timed(stage: str) -> Iterator[None]:
    """Tell how long a stage took, as ``note("time", of=stage, seconds=...)``."""
    start = time.perf_counter()
    try:
        yield
    finally:
        note("time", of=stage, seconds=time.perf_counter() - start)
