"""fx2relax: PyTorch models through Apache TVM's Relax.

``torch.compile(model, backend="relax")`` compiles; `from_fx` imports.
"""

import importlib
from typing import Any

from fx2relax._version import __version__

try:
    import torch as _torch
except ImportError:  # saved artifacts run without PyTorch
    _torch = None  # type: ignore[assignment]

if _torch is not None:
    from fx2relax.errors import (
        BuildFailure,
        Fx2RelaxError,
        ImportFailure,
        OptionError,
        RegistrationError,
        Unsupported,
        UnsupportedOpError,
    )
    from fx2relax.frontend import from_fx
    from fx2relax.registry import Promotion, converts, load_third_party, overrides
    from fx2relax.report import reset_stats, stats

__all__ = [
    "BuildFailure",
    "Fx2RelaxError",
    "ImportFailure",
    "OptionError",
    "Promotion",
    "RegistrationError",
    "Unsupported",
    "UnsupportedOpError",
    "__version__",
    "converts",
    "from_fx",
    "load",
    "overrides",
    "reset_stats",
    "stats",
]


def __getattr__(name: str) -> Any:
    if name == "load":
        return importlib.import_module("fx2relax.deploy").load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if _torch is not None:
    importlib.import_module("fx2relax.converters")
    load_third_party()
