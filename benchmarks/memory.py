"""How much memory this process holds and has held, in MB."""

from __future__ import annotations

import contextlib
import re
import resource
from pathlib import Path

_PROC = Path("/proc/self")


def _field(file: str, name: str) -> float | None:
    """A field of a file in /proc, which gives kB; None where there is no such file."""
    with contextlib.suppress(OSError):
        found = re.search(rf"^{name}:\s+(\d+) kB", (_PROC / file).read_text(), re.M)
        if found:
            return int(found[1]) / 1024
    return None


def peak() -> float:
    """The largest resident memory since the start or since `reset_peak`."""
    high = _field("status", "VmHWM")
    return high if high is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def held() -> float:
    """Memory now, without what is mapped from files where that is known.

    Of libraries, how much is resident and with whom it is shared changes from moment to moment.
    """
    own = _field("smaps_rollup", "Anonymous")
    return own if own is not None else _field("status", "VmRSS") or peak()


def children_peak() -> float:
    """The largest resident memory of one process that this one started, such as a compiler."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def reset_peak() -> None:
    """Start `peak` over; where the system does not allow it, `peak` stays that of the process."""
    with contextlib.suppress(OSError):
        (_PROC / "clear_refs").write_text("5")
