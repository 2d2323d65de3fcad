"""A fork waits until no other thread is inside of TVM, and holds back those that would enter.

TVM guards its memory with locks that no fork handler opens: in the child, one that another thread
held at that moment would stay closed, and the first call would wait for it forever.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

# A fork waits so long for calls at hand, and calls so long for a fork.
_SECONDS = 10.0
_POLL = 0.0002


class Inside:
    """How often its thread is inside of TVM; what has one counts it up and down around calls.

    `FORK` is to be asked after counting up, and not before: no switch of threads between the two
    can then let a call slip past a fork.
    """

    def __init__(self) -> None:
        self.inside = 0
        self.thread = threading.get_ident()
        FORK.add(self)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be inside for as long as a block of code runs."""
        self.inside += 1
        try:
            if FORK.closed:
                FORK.wait(self)
            yield
        finally:
            self.inside -= 1


class _Fork:
    """Whether a process is being forked."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Inside]] = {}  # which is copied without a switch
        self._reset()

    def _reset(self) -> None:
        self.closed = False
        self._opened = threading.Event()
        self._forking: int | None = None
        self._turn = threading.Lock()
        self._has_turn = False

    def add(self, caller: Inside) -> None:
        """Wait for a caller from now on."""
        key, known = id(caller), self._known
        known[key] = weakref.ref(caller, lambda _: known.pop(key, None))

    def wait(self, caller: Inside) -> None:
        """Stay outside until the fork is over; a call within a call goes on."""
        end = time.monotonic() + _SECONDS
        while self.closed and caller.inside == 1 and self._forking != caller.thread:
            caller.inside = 0
            try:
                self._opened.wait(max(0.0, end - time.monotonic()))
            finally:
                caller.inside = 1
            if time.monotonic() >= end:
                return

    def before(self) -> None:
        self._has_turn = self._turn.acquire(timeout=_SECONDS)
        self._forking = threading.get_ident()
        self._opened.clear()
        self.closed = True
        end = time.monotonic() + _SECONDS
        while self._is_busy() and time.monotonic() < end:
            time.sleep(_POLL)

    def _others(self) -> list[Inside]:
        alive = [reference() for reference in list(self._known.values())]
        return [each for each in alive if each is not None and each.thread != self._forking]

    def _is_busy(self) -> bool:
        return any(each.inside for each in self._others())

    def after_in_parent(self) -> None:
        self.closed, self._forking = False, None
        self._opened.set()
        if self._has_turn:
            self._has_turn = False
            self._turn.release()

    def after_in_child(self) -> None:
        for each in self._others():
            each.inside = 0
        self._reset()


FORK = _Fork()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=FORK.before,
        after_in_parent=FORK.after_in_parent,
        after_in_child=FORK.after_in_child,
    )
