"""What PyTorch's own switches show of compiling.

``TORCH_LOGS="fx2relax"`` logs a line for each graph; ``TORCH_LOGS="+fx2relax"`` all artifacts, and
``TORCH_LOGS="+fx2relax.logs.tir"`` one of them: the modules of this package are their names. With
``TORCH_TRACE`` the same artifacts are part of PyTorch's structured trace.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from torch._logging._internal import trace_log, trace_structured

from fx2relax import stages

ARTIFACTS = ("relax_ir", "fusion", "tir", "kernels", "library", "cache")
_PREFIX = f"{__name__}."


class Listener(stages.Observer):
    """Writes the artifacts of each stage to their logs."""

    def __init__(self) -> None:
        self._modules = {name: importlib.import_module(_PREFIX + name) for name in ARTIFACTS}

    def note(self, stage: str, what: dict[str, Any]) -> None:
        """Log what a stage has made, for whoever asked for it."""
        for name, module in self._modules.items():
            if stage == module.STAGE:
                log = logging.getLogger(_PREFIX + name)
                if log.isEnabledFor(logging.DEBUG):
                    log.debug("%s", module.text(what))
                _trace(name, module, what)


def _trace(name: str, module: Any, what: dict[str, Any]) -> None:
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"fx2relax_{name}", "encoding": "string"},
        payload_fn=lambda: module.text(what),
    )


def are_wanted() -> bool:
    """Whether anyone has asked for an artifact, or for PyTorch's trace."""
    names = (logging.getLogger(_PREFIX + name) for name in ARTIFACTS)
    return bool(trace_log.handlers) or any(log.isEnabledFor(logging.DEBUG) for log in names)


def install() -> None:
    """Listen to all that is compiled from now on; done once."""
    if not any(isinstance(observer, Listener) for observer in stages.listeners):
        stages.listeners.append(Listener())
