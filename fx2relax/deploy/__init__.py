"""Artifacts: folders with a library, its weights and a manifest, that run without PyTorch.

Needs Apache TVM, NumPy and Python's own modules, and of TVM the runtime alone.
"""

from fx2relax.errors import ArtifactError

from . import printing as printing  # registers what functions call
from . import structure
from .artifact import Artifact, load
from .call import Callee
from .folder import Objects, save
from .linking import link
from .manifest import (
    File,
    Function,
    Manifest,
    Parameter,
    Result,
    Size,
    State,
    Weight,
)
from .weight_file import WeightFile

__all__ = [
    "Artifact",
    "ArtifactError",
    "Callee",
    "File",
    "Function",
    "Manifest",
    "Objects",
    "Parameter",
    "Result",
    "Size",
    "State",
    "Weight",
    "WeightFile",
    "link",
    "load",
    "save",
    "structure",
]
