"""Relax and TIR passes: one concern a file."""

from .alike import SharedWeightsError
from .build import assemble, build, census, give, library_code, lower, machine_code
from .lifted import Kept, Lifted, Shared
from .shared import LinkError
from .sharing import lift_weights, share_transforms

__all__ = [
    "Kept",
    "Lifted",
    "LinkError",
    "Shared",
    "SharedWeightsError",
    "assemble",
    "build",
    "census",
    "give",
    "library_code",
    "lift_weights",
    "lower",
    "machine_code",
    "share_transforms",
]
