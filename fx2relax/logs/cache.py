"""Programs that were found compiled, or stored."""

from __future__ import annotations

from typing import Any

STAGE = "cache"


def text(what: dict[str, Any]) -> str:
    """Whether a program was found, missed or stored, and by which key."""
    return f"{what['event']}: {what['key'] or 'no cache'}"
