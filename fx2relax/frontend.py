"""`from_fx`: any FX graph as a Relax module."""

from __future__ import annotations


def from_fx() -> None: ...
