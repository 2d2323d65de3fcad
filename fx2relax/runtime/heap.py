"""Memory and the system: what is free, what there is, and what is to lie in large pages."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import tvm_ffi

_PAGE = 2 << 20
#: Up to as many bytes glibc keeps what is freed, at most; see `keep_freed`.
KEPT = (32 << 20) - (64 << 10)
#: Results of as many bytes hold a large page. What a step has freed has often gone back to the
#: system, so that the next one finds no page behind them.
LARGE = _PAGE
_HUGE_PAGES = 14  # Linux's MADV_HUGEPAGE
_TRIM_THRESHOLD = -1  # glibc's M_TRIM_THRESHOLD
_MOST = (1 << 31) - 1  # it takes an int of C's
_steps: dict[int, int] = {}
_MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")  # a container's own limit


def give_back() -> None:
    """Let the C library return the pages that nothing uses.

    Weights are made and packed in large pieces between small ones that stay, so that glibc keeps
    what is freed: 80 MB for a ResNet-50. Other C libraries are left alone. TVM's pool of memory for
    values is emptied of what no program uses at the moment.
    """
    clear = tvm_ffi.get_global_func("vm.builtin.memory_manager.clear", allow_missing=True)
    if clear is not None:
        clear()
    trim = _libc("malloc_trim")
    if trim is not None:
        trim(0)


@functools.cache
def _libc(name: str) -> Any:
    """A function of the C library; None where there is no such function."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None


@functools.cache
def keep_freed() -> None:
    """Let the C library keep what is freed, as it does in any process that has freed much at once.

    The library makes its results anew at each call. glibc maps each of them afresh, and faults its
    pages in, until something as large was freed once, and never of more than 32 MiB: a MobileNetV3
    of batch 8 had 4,000 faults a call and took 35 ms in place of 30. Nothing is written to what is
    asked for here, so that no memory is taken. Other C libraries are left as they are.
    """
    torch.UntypedStorage(KEPT)


def keep_step(program: object, size: int) -> None:
    """Let the C library keep what a step of training frees, for as long as a program of it lives.

    Once 64 MiB at its end are free, glibc cuts the heap off there, gradients of the last step with
    it: a step of GPT-2 faulted 13,000 pages in, which took 10 ms, or 350 where a virtual machine's
    host had taken them back. A threshold that the user has set stays.

    Args:
        program: what makes tensors that a step frees, or lives as long.
        size: how many bytes of them, all of which lie in the heap.
    """
    if size:
        _steps[id(program)] = size
        weakref.finalize(program, _forget_step, id(program))
        _set_threshold()


def _forget_step(program: int) -> None:
    _steps.pop(program, None)
    _set_threshold()


def _set_threshold() -> None:
    set_option = _threshold()
    if set_option is not None:
        set_option(_TRIM_THRESHOLD, min(2 * KEPT + sum(list(_steps.values())), _MOST))


@functools.cache
def _threshold() -> Callable[[int, int], int] | None:
    """Glibc's `mallopt`, unless the user has set the threshold."""
    told = os.environ.get("GLIBC_TUNABLES", "")
    if "MALLOC_TRIM_THRESHOLD_" in os.environ or "trim_threshold" in told:
        return None
    found: Callable[[int, int], int] | None = _libc("mallopt")
    return found


def leaves_room_for(size: int) -> bool:
    """Whether as many bytes are at most half of what can still be had; yes where nobody says."""
    found = [int(kb) << 10 for kb in re.findall(r"^MemAvailable:\s+(\d+)", _text(_MEMORY), re.M)]
    limit, used = (_text(_GROUP / f"memory.{name}").strip() for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        # Files that are in memory because they were read make room.
        files = re.search(r"^inactive_file (\d+)", _text(_GROUP / "memory.stat"), re.M)
        found.append(int(limit) - int(used) + (int(files[1]) if files else 0))
    return not found or 2 * size <= min(found)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def in_large_pages(fresh: torch.Tensor) -> torch.Tensor:
    """The same tensor of at least `LARGE` bytes, all of which is about to be written.

    The gradient of a table of 94 MB is filled in 5 ms in large pages, in 19 ms in those of 4 KB.
    """
    advise = _advise()
    if advise is not None:
        start = -(-fresh.data_ptr() // _PAGE) * _PAGE
        end = (fresh.data_ptr() + fresh.untyped_storage().nbytes()) // _PAGE * _PAGE
        if start < end:
            advise(start, end - start, _HUGE_PAGES)
    return fresh


@functools.cache
def _advise() -> Callable[[int, int, int], int] | None:
    """Linux's `madvise`, where large pages are for those that ask."""
    found: Any = _libc("madvise") if "[madvise]" in _text(_MODE) else None
    if found is not None:
        found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found  # type: ignore[no-any-return]
