"""What compiling goes through, told to whoever looks on: reports, logs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from torch.autograd import profiler


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


# What a compilation itself needs of its stages; nobody looks on.
_keepers: ContextVar[tuple[dict[str, list[dict[str, Any]]], ...]] = ContextVar(
    "fx2relax_keepers", default=()
)


@contextmanager
def kept(*names: str) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """What stages of these names tell inside, in order, by their names."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    before = _keepers.get()
    try:
        _keepers.set((*before, found))
        yield found
    finally:
        _keepers.set(before)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Tell an observer of all that is compiled inside."""
    before = _observers.get()
    try:  # Ctrl-C may come between any two lines
        _observers.set((*before, observer))
        yield
    finally:
        _observers.set(before)


@contextmanager
def unobserved() -> Iterator[None]:
    """Tell nobody but the listeners of what is compiled inside."""
    before = _observers.get()
    try:
        _observers.set(())
        yield
    finally:
        _observers.set(before)


def are_observed() -> bool:
    """Whether anyone looks on; what only they need is not made otherwise."""
    return bool(_observers.get())


def is_wanted(stage: str) -> bool:
    """Whether anyone looks on, or a compilation itself needs a stage."""
    return are_observed() or any(stage in keeper for keeper in _keepers.get())


def note(stage: str, **what: Any) -> None:
    """Tell of a stage."""
    for keeper in _keepers.get():
        if stage in keeper:
            keeper[stage].append(what)
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
        with recorded(stage):
            yield
    finally:
        note("time", of=stage, seconds=time.perf_counter() - start)


def recorded(stage: str) -> AbstractContextManager[Any]:
    """Show a stage in the timeline of `torch.profiler`, if one is being recorded."""
    if not profiler._is_profiler_enabled:
        return nullcontext()
    return profiler.record_function(f"fx2relax: {stage}")
