"""Garbage collection while modules are imported and graphs compiled."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """Let collections look only at what is made within.

    Tracing and lowering make many objects, and with PyTorch imported each full collection looks
    at hundreds of thousands that stay: a tenth of the time of compiling. What a user has frozen
    himself stays frozen.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Collect nothing within; for what leaves little garbage."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


_tracing = contextlib.ExitStack()


def begin_tracing(arguments: Any) -> None:
    """What Dynamo is to call when it begins to trace, `end_tracing` when nothing is traced.

    A tenth of the time until it hands a graph over went into collections.
    """
    _tracing.enter_context(set_aside())


def end_tracing(arguments: Any) -> None:
    _tracing.close()
