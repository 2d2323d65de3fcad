"""Relax and TIR passes: one concern a file."""

from .build import assemble, build, census, give, library_code, lower, machine_code
from .shared import LinkError

__all__ = [
    "LinkError",
    "assemble",
    "build",
    "census",
    "give",
    "library_code",
    "lower",
    "machine_code",
]
