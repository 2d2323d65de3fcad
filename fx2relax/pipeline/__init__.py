"""Relax and TIR passes: one concern a file."""

from .build import assemble, assemble_library, build, census, lower

__all__ = ["assemble", "assemble_library", "build", "census", "lower"]
