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

_holders: weakref.WeakKeyDictionary[Any, dict[str, Callable[[], Any]]] = weakref.WeakKeyDictionary()


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
    _holders.setdefault(holder, {})[name] = make
    return lock


def _renew() -> None:
    for holder, locks in list(_holders.items()):
        for name, make in locks.items():
            setattr(holder, name, make())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
