"""Locks that are open in the child of a fork, whoever held them in its parent.

Only the thread that forks lives on in the child: a lock that another one held would stay closed.
What another thread has left half done behind such a lock must do no harm.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

# By identity: a holder may be a mapping, which has no hash.
_holders: dict[int, tuple[Any, dict[str, Callable[[], Any]]]] = {}


def own(holder: Any, name: str, make: Callable[[], Any] = threading.Lock) -> Any:
    """Give an object a lock of its own, and another one in the child of a fork.

    It is Python's own lock, which ``with`` takes and lets go of whenever Ctrl-C comes.

    Args:
        holder: an object or a module.
        name: the attribute that the lock is put in.
        make: what makes it.

    Returns:
        the lock.
    """
    lock = make()
    setattr(holder, name, lock)
    key = id(holder)
    if key not in _holders:
        _holders[key] = weakref.ref(holder, lambda _: _holders.pop(key, None)), {}
    _holders[key][1][name] = make
    return lock


def _renew() -> None:
    for held, locks in list(_holders.values()):
        holder = held()
        for name, make in locks.items() if holder is not None else ():
            setattr(holder, name, make())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
