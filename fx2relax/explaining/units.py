"""Numbers as people read them."""

from __future__ import annotations


def seconds(value: float | None) -> str:
    """Such as ``1.24 ms``; empty where there is none."""
    if value is None:
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e9:.0f} ns"


def size(value: float) -> str:
    """Bytes, such as ``1.5 MB``."""
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= step:
            return f"{value / step:.3g} {unit}"
    return f"{value:.0f} B"


def rate(amount: float, spent: float | None, unit: str) -> str:
    """Such as ``48 GB/s``; empty where there is nothing to divide."""
    if not spent or not amount:
        return ""
    return f"{amount / spent / 1e9:.3g} G{unit}/s"


def share(part: float, whole: float) -> str:
    """Such as ``12.5 %``."""
    return f"{100 * part / whole:.1f} %" if whole else ""
