"""Relax and TIR passes: one concern a file."""

from .build import assemble, build, census, give, library_code, lower, machine_code, portable_code
from .shared import LinkError, Unlinked

__all__ = [
    "LinkError",
    "Unlinked",
    "assemble",
    "build",
    "census",
    "give",
    "library_code",
    "lower",
    "machine_code",
    "portable_code",
]
