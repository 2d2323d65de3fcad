"""Environment variables that switch a part of this package off, or on."""

from __future__ import annotations

import os

#: Few tests of kernels for NVIDIA GPUs have run on one, so that they are asked for.
CUDA = "FX2RELAX_CUDA"


def is_on(name: str, otherwise: str = "1") -> bool:
    """Whether an environment variable, or `otherwise` where it is not set, is not 0, off, false."""
    return os.environ.get(name, otherwise).lower() not in ("0", "off", "false")


def cuda_asked_for() -> bool:
    """Whether FX2RELAX_CUDA=1 asks for kernels for NVIDIA GPUs."""
    return is_on(CUDA, otherwise="0")
