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
#: So many results that lie where one has lain are taken as advised. The system keeps advice until
#: memory is returned to it, which glibc does with the end of its heap now and then.
_TAKEN = 63
_PLACES = 1000  # how many addresses are remembered
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
_MOST = (1 << 31) - 1  # it takes an int of C's
#: By program, what a call of it frees, and what it leaves to be freed by the next step.
_frees: dict[int, tuple[int, int]] = {}
#: By the address and bytes of a result, how many more are taken as advised.
_advised: dict[tuple[int, int], int] = {}
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
    of batch 8 had 4,000 faults a call and took 35 ms in place of 30. Other C libraries are left as
    they are, and so is a threshold that the user has set.
    """
    _set_thresholds()


def keep_for(program: object, *, call: int = 0, step: int = 0) -> None:
    """Let the C library keep what is freed again and again, for as long as a program lives.

    Once 64 MiB at its end are free, glibc cuts the heap off there, gradients of the last step with
    it: a step of GPT-2 faulted 13,000 pages in, which took 10 ms, or 350 where a virtual machine's
    host had taken them back. A ResNet-50 of batch 8 faulted 12,500 in at each call, 40 ms of the
    two processors' time.

    Args:
        program: what makes the tensors, or lives as long.
        call: how many bytes of them, at most, a call frees before it ends or another one begins.
        step: how many bytes of them live on until the next step of training, beside those of
            other programs.
    """
    if call or step:
        _frees[id(program)] = call, step
        weakref.finalize(program, _forget, id(program))
        _set_thresholds()


def _forget(program: int) -> None:
    _frees.pop(program, None)
    _set_thresholds()


def _set_thresholds() -> None:
    set_option = _option()
    if set_option is not None:
        # Once one of them is set, glibc adapts the other no longer either.
        set_option(_MMAP_THRESHOLD, KEPT)
        calls, steps = zip((0, 0), *list(_frees.values()), strict=True)
        set_option(_TRIM_THRESHOLD, min(2 * KEPT + max(calls) + sum(steps), _MOST))


@functools.cache
def _option() -> Callable[[int, int], int] | None:
    """Glibc's `mallopt`, unless the user has set one of the thresholds."""
    told = os.environ.get("GLIBC_TUNABLES", "")
    for name in ("trim_threshold", "mmap_threshold"):
        if f"MALLOC_{name.upper()}_" in os.environ or f"glibc.malloc.{name}" in told:
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
    The advice takes 4 us: it is not repeated at each call where glibc keeps what is freed.
    """
    advise = _advise()
    if advise is None:
        return fresh
    place = address, size = fresh.data_ptr(), fresh.nbytes
    if left := _advised.get(place, 0):
        _advised[place] = left - 1
        return fresh
    start = -(-address // _PAGE) * _PAGE
    end = (address + fresh.untyped_storage().nbytes()) // _PAGE * _PAGE
    if start < end:
        advise(start, end - start, _HUGE_PAGES)
    if size <= KEPT and _option() is not None:
        if len(_advised) >= _PLACES:
            _advised.clear()
        _advised[place] = _TAKEN
    return fresh


@functools.cache
def _advise() -> Callable[[int, int, int], int] | None:
    """Linux's `madvise`, where large pages are for those that ask."""
    found: Any = _libc("madvise") if "[madvise]" in _text(_MODE) else None
    if found is not None:
        found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found  # type: ignore[no-any-return]
