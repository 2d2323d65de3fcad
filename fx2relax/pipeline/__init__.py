"""Relax and TIR passes: one concern a file."""

from .build import assemble, build, census, lower

__all__ = ["assemble", "build", "census", "lower"]
