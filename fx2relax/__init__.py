"""fx2relax: PyTorch models through Apache TVM's Relax.

``torch.compile(model, backend="relax")`` compiles; `from_fx` imports; `export` ships.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fx2relax._version import __version__

if TYPE_CHECKING:
    from fx2relax import deploy, extern, pipeline, testing
    from fx2relax.background import wait_for_compilation
    from fx2relax.checking import Checked, check, reproduce
    from fx2relax.custom import custom_op
    from fx2relax.deploy import Artifact, load
    from fx2relax.errors import (
        ArtifactError,
        BuildFailure,
        Fx2RelaxError,
        ImportFailure,
        InstallationError,
        OptionError,
        RegistrationError,
        Unsupported,
        UnsupportedOpError,
        WeightError,
    )
    from fx2relax.explaining import Explanation, explain
    from fx2relax.exporting import Exported, export, from_exported_program, jit
    from fx2relax.frontend import from_fx
    from fx2relax.registry import Promotion, converts, overrides
    from fx2relax.report import reset_stats, stats
    from fx2relax.spec import Dim, Tensor
    from fx2relax.tuner import Tuned, tune

# Imported when they are asked for: an exported model is loaded where there is no PyTorch.
_PLACES = {
    "background": ("wait_for_compilation",),
    "checking": ("Checked", "check", "reproduce"),
    "custom": ("custom_op",),
    "deploy": ("Artifact", "load"),
    "errors": (
        "ArtifactError",
        "BuildFailure",
        "Fx2RelaxError",
        "ImportFailure",
        "InstallationError",
        "OptionError",
        "RegistrationError",
        "Unsupported",
        "UnsupportedOpError",
        "WeightError",
    ),
    "explaining": ("Explanation", "explain"),
    "exporting": ("Exported", "export", "from_exported_program", "jit"),
    "frontend": ("from_fx",),
    "registry": ("Promotion", "converts", "overrides"),
    "report": ("reset_stats", "stats"),
    "spec": ("Dim", "Tensor"),
    "tuner": ("Tuned", "tune"),
}
_MODULES = ("deploy", "extern", "pipeline", "testing")

__all__ = [
    "Artifact",
    "ArtifactError",
    "BuildFailure",
    "Checked",
    "Dim",
    "Explanation",
    "Exported",
    "Fx2RelaxError",
    "ImportFailure",
    "InstallationError",
    "OptionError",
    "Promotion",
    "RegistrationError",
    "Tensor",
    "Tuned",
    "Unsupported",
    "UnsupportedOpError",
    "WeightError",
    "__version__",
    "check",
    "converts",
    "custom_op",
    "deploy",
    "explain",
    "export",
    "extern",
    "from_exported_program",
    "from_fx",
    "jit",
    "load",
    "overrides",
    "pipeline",
    "reproduce",
    "reset_stats",
    "stats",
    "testing",
    "tune",
    "wait_for_compilation",
]

_WHERE = {name: place for place, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(_imported(_WHERE[name]), name)
    elif name in _MODULES:
        value = _imported(name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _imported(place: str) -> Any:
    """One of this package's modules; an error that says what is missing where it needs that."""
    try:
        return importlib.import_module(f"{__name__}.{place}")
    except ImportError as error:
        from fx2relax import installed

        raise installed.explained(error) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
