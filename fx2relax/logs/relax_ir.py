"""The Relax module that a graph was imported as."""

from __future__ import annotations

from typing import Any

STAGE = "drafted"


def text(what: dict[str, Any]) -> str:
    """The module as TVMScript."""
    return str(what["imported"].mod.script(show_meta=False))
