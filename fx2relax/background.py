"""Compiling that nobody waits for: in one thread, which yields to a fork and to the end.

What only waits for another process has a thread of its own: it holds nobody up, and no fork waits
for it.
"""

from __future__ import annotations

import atexit
import contextvars
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fx2relax import stages
from fx2relax.switches import is_on

log = logging.getLogger("fx2relax")

# A fork waits so long for the work at hand: its locks would stay held in the child.
_FORK_SECONDS = 60.0


class Stopped(RuntimeError):
    """The process ends, or another reason why the work is no longer wanted."""


class Job:
    """Work for the thread.

    Args:
        work: makes the result; it calls `checkpoint` now and then.
        what: what it makes, for the log.
        waits: whether it does nothing here but wait for another process.
    """

    def __init__(self, work: Callable[[], Any], what: str, waits: bool = False) -> None:
        self._work: Callable[[], Any] | None = work
        self._context = contextvars.copy_context()
        self._what = what
        self._worker = _waiter if waits else _worker
        self._begun = False
        #: What `work` returned; None before it has, and where it failed.
        self.result: Any = None
        self.done = False

    def start(self) -> None:
        """Queue the work, once."""
        if not self._begun:
            self._begun = True
            self._worker.add(self)

    def run(self) -> None:
        """Do the work here."""
        self._begun = True
        work, self._work = self._work, None
        try:
            if work is not None:
                self.result = self._context.run(work)
        except Stopped:
            pass
        except Exception as error:
            self._context.run(stages.note, "left", error=error)
            self.leave(error)
        finally:
            self.done = True

    def leave(self, why: BaseException) -> None:
        """Say that there will be no result, and why."""
        log.info("%s: %s: %s", self._what, type(why).__name__, why)
        self.done = True


class _Worker:
    """A thread and its queue. There is no thread while there is no work.

    Args:
        name: the thread's.
        fork_waits: whether a fork waits for the work at hand.
    """

    def __init__(self, name: str, fork_waits: bool) -> None:
        self.name, self.fork_waits = name, fork_waits
        self._reset()
        self.stopping = self.held = False

    def _reset(self) -> None:
        self.jobs: deque[Job] = deque()
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None
        self.working = threading.Lock()

    def add(self, job: Job) -> None:
        with self.changed:
            if self.stopping:
                job.done = True
                return
            self.jobs.append(job)
            self._begin()

    def _begin(self) -> None:
        """See to it that there is a thread for what there is to do."""
        if not self.jobs or (self.thread is not None and self.thread.is_alive()):
            return
        # At the end of the process it is asked to stop, and waited for.
        self.thread = threading.Thread(target=self._work, name=self.name, daemon=True)
        try:
            self.thread.start()
        except RuntimeError as error:  # the system gives no more threads
            self.thread = None
            while self.jobs:
                self.jobs.popleft().leave(error)

    def _work(self) -> None:
        own = threading.current_thread()
        with self.changed:
            job = self._next(own)
        while job is not None:
            try:
                with self.working:
                    job.run()
            except BaseException as error:  # the thread lives on, whatever is thrown into it
                job.leave(error)
            with self.changed:
                self.jobs.popleft()
                job = self._next(own)

    def _next(self, own: threading.Thread) -> Job | None:
        """What a thread does next; None ends it, and whoever waits finds no thread then."""
        self.changed.notify_all()
        # Ctrl-C may come while a thread is begun, which then runs beside the next one.
        if self.jobs and not self.stopping and self.thread is own:
            return self.jobs[0]
        if self.thread is own:
            self.thread = None
        return None

    def wait(self, timeout: float | None) -> bool:
        with self.changed:
            self._begin()  # Ctrl-C may have come between a job and its thread
            return self.changed.wait_for(lambda: not self.jobs, timeout)

    def stop(self) -> None:
        self.stopping = True
        thread = self.thread
        if thread is not None:
            thread.join()

    def before_fork(self) -> None:
        own = threading.current_thread() is self.thread
        waits = self.fork_waits and not own
        self.held = waits and self.working.acquire(timeout=_FORK_SECONDS)

    def after_fork_in_parent(self) -> None:
        if self.held:
            self.held = False
            self.working.release()

    def after_fork_in_child(self) -> None:
        """The thread is not there; what it was to do is not done."""
        for job in self.jobs:
            job.done = True
        self.held = False
        self._reset()


_worker = _Worker("fx2relax", fork_waits=True)
_waiter = _Worker("fx2relax waits", fork_waits=False)
for _each in (_worker, _waiter):
    atexit.register(_each.stop)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=_each.before_fork,
            after_in_parent=_each.after_fork_in_parent,
            after_in_child=_each.after_fork_in_child,
        )


@contextmanager
def elsewhere() -> Iterator[None]:
    """While it is entered, the work at hand but waits for another process: no fork waits for it."""
    if threading.current_thread() is not _worker.thread:
        yield
        return
    _worker.working.release()
    try:
        yield
    finally:
        _worker.working.acquire()


def enabled() -> bool:
    """Whether there is a thread: unless FX2RELAX_BACKGROUND=0 forbids it, or someone looks on."""
    return is_on("FX2RELAX_BACKGROUND") and not stages.are_observed()


def checkpoint() -> None:
    """Raise `Stopped` in the thread if its work is no longer wanted."""
    own = threading.current_thread()
    if any(each.stopping and own is each.thread for each in (_worker, _waiter)):
        raise Stopped


def wait_for_compilation(timeout: float | None = None) -> bool:
    """Wait until nothing is compiled or tuned in the background.

    With ``library="auto"`` a graph's second program is compiled while the first one runs. What is
    to be timed is timed after that, and after the few calls that choose between the two. Tuning
    begins after them, and what it made is chosen, or not, by a few calls more.

    Args:
        timeout: in seconds; without end when left out.

    Returns:
        whether all is compiled.
    """
    end = None if timeout is None else time.monotonic() + timeout
    # Work of one thread may begin work of the other.
    while any(each.jobs for each in (_worker, _waiter)):
        for each in (_worker, _waiter):
            if not each.wait(None if end is None else max(end - time.monotonic(), 0.0)):
                return False
    return True
