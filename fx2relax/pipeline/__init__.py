"""Relax and TIR passes: one concern a file."""

from .build import build, lower

__all__ = ["build", "lower"]
