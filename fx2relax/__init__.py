"""fx2relax: PyTorch models through Apache TVM's Relax.

``torch.compile(model, backend="relax")`` compiles; `from_fx` imports.
"""

import importlib

from fx2relax import extern
from fx2relax._version import __version__
from fx2relax.custom import custom_op
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
    "custom_op",
    "extern",
    "from_fx",
    "overrides",
    "reset_stats",
    "stats",
]

importlib.import_module("fx2relax.converters")
load_third_party()
