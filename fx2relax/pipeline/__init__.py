"""Relax and TIR passes: one concern a file."""

import importlib
from typing import TYPE_CHECKING, Any

from fx2relax import tvm_import

if TYPE_CHECKING:
    from .alike import SharedWeightsError
    from .building import (
        assemble,
        build,
        census,
        give,
        library_code,
        lower,
        machine_code,
        portable_code,
    )
    from .combining import combine_products
    from .lifted import Kept, Lifted, Shared
    from .merging import merge_transforms
    from .shared import LinkError, Unlinked
    from .sharing import lift_weights, share_transforms

# Imported when they are asked for: what was compiled before runs without a compiler.
_PLACES = {
    "alike": ("SharedWeightsError",),
    "building": (
        "assemble",
        "build",
        "census",
        "give",
        "library_code",
        "lower",
        "machine_code",
        "portable_code",
    ),
    "combining": ("combine_products",),
    "lifted": ("Kept", "Lifted", "Shared"),
    "merging": ("merge_transforms",),
    "shared": ("LinkError", "Unlinked"),
    "sharing": ("lift_weights", "share_transforms"),
}

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

_WHERE = {name: place for place, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    tvm_import.load()
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
