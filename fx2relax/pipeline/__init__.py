"""Relax and TIR passes: one concern a file."""

from .build import assemble, assemble_library, build, census, lower
from .shared import LinkError

__all__ = ["LinkError", "assemble", "assemble_library", "build", "census", "lower"]
