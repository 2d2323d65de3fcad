"""Weights that are packed where they are used, one at a time, and not all before the first call.

The packed weights of a model are a second copy of them. A run that is made once, to be looked at,
does without.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import tvm_ffi
from torch.utils.dlpack import from_dlpack

from . import native
from .library import PREFIX

_KINDS = ("linear", "linear_mkl", "conv", "conv_nhwc", "lstm")
_lock = threading.RLock()
_depth = 0


@contextlib.contextmanager
def packed_at_use(weights: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let programs that are made in the body keep their weights as they are.

    Results are the same: the weight is packed and used by the same functions. Programs that other
    threads make meanwhile do so too. What is computed from weights is packed at once, as else: its
    memory is used again by the program that computes it.

    Args:
        weights: those of the model.
    """
    global _depth
    if not native.use():
        yield
        return
    with _lock:
        _depth += 1
        own = {weight.data_ptr() for weight in weights}
        before = _replaced(own) if _depth == 1 else {}
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            for name, function in before.items():
                tvm_ffi.register_global_func(name, function, override=True)


def _replaced(own: set[int]) -> dict[str, Any]:
    """Put functions in the place of those that pack; what stood there."""
    before: dict[str, Any] = {}
    for kind in _KINDS:
        names = f"{PREFIX}pack_{kind}", f"{PREFIX}packed_{kind}"
        pack, use = (tvm_ffi.get_global_func(name, allow_missing=True) for name in names)
        if pack is None or use is None:  # PyTorch was built without what packs
            continue
        before |= zip(names, (pack, use), strict=True)
        for name, function in zip(names, _late(pack, use, own), strict=True):
            tvm_ffi.register_global_func(name, function, override=True)
    return before


def _late(pack: Callable[..., Any], use: Callable[..., Any], own: set[int]) -> tuple[Any, Any]:
    """A function that keeps a weight and the settings it is packed by, and one that uses both."""

    def kept(weight: Any, *settings: Any) -> Any:
        if from_dlpack(weight.__dlpack__()).data_ptr() in own:
            return tvm_ffi.Array((weight, *settings))
        return pack(weight, *settings)

    def run(*arguments: Any) -> Any:
        return use(*(pack(*a) if isinstance(a, tvm_ffi.Array) else a for a in arguments))

    return kept, run
