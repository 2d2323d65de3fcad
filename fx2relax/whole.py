"""Operators that stay whole while PyTorch traces a graph for us.

For some operators PyTorch installs a decomposition below autograd, as a Python kernel that every
trace runs, whatever table of decompositions it is given. Where a converter is better, or the
decomposition wrong, the Python kernel is taken away for the time of the trace.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch._C import DispatchKey

__all__ = ["is_active", "keep", "whole_operators"]

_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)
_kept: dict[Any, Callable[..., Any] | None] = {}
_taken: list[tuple[Any, dict[Any, Any]]] = []
_lock = threading.RLock()
_depth = 0
_active: contextvars.ContextVar[bool] = contextvars.ContextVar("fx2relax_whole", default=False)


def keep(operator: Any, kernel: Callable[..., Any] | None = None) -> None:
    """Trace an overload as PyTorch's own autograd has it, or as `kernel` writes it."""
    _kept[operator] = kernel


def is_active() -> bool:
    """Whether this thread is inside of `whole_operators`."""
    return _active.get()


@contextlib.contextmanager
def whole_operators() -> Iterator[None]:
    """Inside a ``with`` block PyTorch traces the operators given to `keep` whole."""
    token = _active.set(True)
    _enter()
    try:
        yield
    finally:
        _leave()
        _active.reset(token)


def _enter() -> None:
    global _depth
    with _lock:
        _depth += 1
        if _depth > 1:
            return
        for operator, kernel in _kept.items():
            _taken.append((operator, dict(operator.py_kernels)))
            for key in _KEYS:
                operator.py_kernels.pop(key, None)
                if kernel is not None:
                    operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()


def _leave() -> None:
    global _depth
    with _lock:
        _depth -= 1
        if _depth:
            return
        for operator, kernels in _taken:
            operator.py_kernels.clear()
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()
        _taken.clear()
