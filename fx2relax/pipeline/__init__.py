"""Relax and TIR passes: one concern a file."""

from .alike import SharedWeightsError
from .build import assemble, build, census, give, library_code, lower, machine_code, portable_code
from .combining import combine_products
from .lifted import Kept, Lifted, Shared
from .merging import merge_transforms
from .shared import LinkError, Unlinked
from .sharing import lift_weights, share_transforms

__all__ = [
    "Kept",
    "Lifted",
    "LinkError",
    "Shared",
    "SharedWeightsError",
    "Unlinked",
    "assemble",
    "build",
    "census",
    "combine_products",
    "give",
    "library_code",
    "lift_weights",
    "lower",
    "machine_code",
    "merge_transforms",
    "portable_code",
    "share_transforms",
]
