"""Operators that stay whole while PyTorch traces a graph for us.

For some operators PyTorch installs a decomposition below autograd, as a Python kernel that every
trace runs, whatever table of decompositions it is given. Where a converter is better, or the
decomposition wrong, the Python kernel is taken away for the time of the trace.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DispatchKey
from torch._dynamo.convert_frame import compile_lock

from fx2relax.locks import own

__all__ = ["is_active", "keep", "whole_operators"]

_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)
_kept: dict[Any, Callable[..., Any] | None] = {}
_taken: dict[Any, dict[Any, Any]] = {}
_inside: set[object] = set()
_lock = own(sys.modules[__name__], "_lock", threading.RLock)
_active: contextvars.ContextVar[bool] = contextvars.ContextVar("fx2relax_whole", default=False)


def keep(operator: Any, kernel: Callable[..., Any] | None = None) -> None:
    """Trace an overload as PyTorch's own autograd has it, or as `kernel` writes it."""
    _kept[operator] = kernel


def is_active() -> bool:
    """Whether this thread is inside of `whole_operators`."""
    return _active.get()


@contextlib.contextmanager
def whole_operators() -> Iterator[None]:
    """Inside a ``with`` block PyTorch traces the operators given to `keep` whole.

    One thread at a time is inside, and none while another one compiles: that PyTorch traces is
    said to the whole process.
    """
    before, who = _active.get(), object()
    with compile_lock:
        try:  # Ctrl-C may come between any two lines
            _active.set(True)
            _enter(who)
            yield
        finally:
            _leave(who)
            _active.set(before)


def _enter(who: object) -> None:
    with _lock:
        _inside.add(who)
        for operator, kernel in _kept.items():
            if operator in _taken:
                continue
            _taken[operator] = dict(operator.py_kernels)
            for key in _KEYS:
                operator.py_kernels.pop(key, None)
                if kernel is not None:
                    operator.py_kernels[key] = _unless_transformed(operator, kernel)
            operator._dispatch_cache.clear()


def _leave(who: object) -> None:
    with _lock:
        if who not in _inside:
            return
        if len(_inside) == 1:
            for operator, kernels in _taken.items():
                _put(operator, kernels)
            _taken.clear()
        _inside.discard(who)


def _put(operator: Any, kernels: dict[Any, Any]) -> None:
    operator.py_kernels.clear()
    operator.py_kernels.update(kernels)
    operator._dispatch_cache.clear()


def _unless_transformed(operator: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel in whose place PyTorch's own is called while `torch.func` transforms.

    `torch.func` does not differentiate operators of one's own.
    """

    def chosen(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._are_functorch_transforms_active():
            return kernel(*args, **kwargs)
        ours = dict(operator.py_kernels)
        _put(operator, _taken[operator])
        try:
            return operator(*args, **kwargs)
        finally:
            _put(operator, ours)

    return chosen
