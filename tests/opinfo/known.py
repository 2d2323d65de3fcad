"""Rows that are known to differ from eager, each with the defect of PyTorch or TVM behind it."""

from __future__ import annotations

from .check import Outcome

ANY = "*"
# (operator, dtype, manner) -> the evidence.
KNOWN: dict[tuple[str, str, str], str] = {}


def expected(outcome: Outcome) -> str | None:
    """Why a row differs, or None for one that must not."""
    for (op, dtype, manner), reason in KNOWN.items():
        if op == outcome.op and dtype in (ANY, outcome.dtype) and manner in (ANY, outcome.manner):
            return reason
    return None
