"""Sizes, times and rates as people write them."""

from __future__ import annotations

import time

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def count_text(count: int, what: str) -> str:
    """``1 kernel``, ``3 kernels``."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def size_text(count: int | None) -> str:
    """``3.4 MiB``."""
    if count is None:
        return "unknown"
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def age_text(when: float) -> str:
    """``3 h``: how long ago it was."""
    seconds = max(time.time() - when, 0)
    for unit, limit in (("s", 60), ("m", 3600), ("h", 86400)):
        if seconds < limit:
            return f"{seconds / _SECONDS[unit]:.0f} {unit.replace('m', 'min')}"
    return f"{seconds / 86400:.0f} d"


def seconds(text: str) -> float:
    """The seconds of ``30d``, ``12h`` or ``90m``; raises ValueError for anything else."""
    text = text.strip().lower()
    try:
        found = float(text[:-1]) * _SECONDS[text[-1:]]
    except (ValueError, KeyError):
        found = -1
    if not 0 <= found < float("inf"):
        raise ValueError(f"{text!r} is no age such as 30d, 12h or 90m")
    return found


def duration_text(value: float | None) -> str:
    """Such as ``1.24 ms``; empty where there is none."""
    if value is None:
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e9:.0f} ns"


def rate_text(amount: float, spent: float | None, unit: str) -> str:
    """Such as ``48 GB/s``; empty where there is nothing to divide."""
    if not spent or not amount:
        return ""
    return f"{amount / spent / 1e9:.3g} G{unit}/s"


def share_text(part: float, whole: float) -> str:
    """Such as ``12.5 %``."""
    return f"{100 * part / whole:.1f} %" if whole else ""
