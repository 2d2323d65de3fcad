"""The sides that are compared: what each compiles with, and how it is told to.

`SIDES` is read by the driver, which does not import PyTorch; `compile` runs in a worker process.
"""

from __future__ import annotations

import ast
import importlib.util
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class SideFailed(RuntimeError):
    """A side that did not do its work, and left it to another without an error."""


@dataclass
class Setup:
    """What a worker tells a side.

    Attributes:
        threads: threads to compute with.
        cache: a folder that this cell alone uses.
        options: for our backend.
        fallbacks: what the side left to another; it adds to them as it finds them.
    """

    threads: int
    cache: str
    options: dict[str, Any] = field(default_factory=dict)
    fallbacks: list[str] = field(default_factory=list)


def _eager(model: Any, setup: Setup) -> Any:
    return model


def _dynamo(model: Any, setup: Setup) -> Any:
    import torch

    return torch.compile(model, backend="eager")


def _inductor(model: Any, setup: Setup) -> Any:
    import torch

    return torch.compile(model, backend="inductor")


def _inductor_replayed(model: Any, setup: Setup) -> Any:
    import torch

    return torch.compile(model, backend="inductor", mode="reduce-overhead")


def _freezing(model: Any, setup: Setup) -> Any:
    import torch
    import torch._inductor.config

    torch._inductor.config.freezing = True
    return torch.compile(model, backend="inductor")


class _Fallbacks(logging.Handler):
    """OpenVINO's backend falls back to Inductor or to eager, and logs it at debug level."""

    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.DEBUG)
        self.found = found

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "failed" in message.lower():
            self.found.append(" ".join(message.split())[:300])


def _openvino(model: Any, setup: Setup) -> Any:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from openvino.frontend.pytorch.torchdynamo import backend, execute

    handler = _Fallbacks(setup.fallbacks)
    for module in (backend, execute):
        module.logger.setLevel(logging.DEBUG)
        module.logger.propagate = False
        module.logger.addHandler(handler)

    def instead(*args: Any, **kwargs: Any) -> Any:
        raise SideFailed(setup.fallbacks[-1] if setup.fallbacks else "it fell back to Inductor")

    backend.compile_fx = instead  # what it compiles with when its own compilation has failed
    config = {
        # Some of its versions read the configuration only if it has this entry.
        "CACHE_DIR": setup.cache,
        # It computes in bfloat16 where the processor can, unless told not to.
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": setup.threads,
        "PERFORMANCE_HINT": "LATENCY",
    }
    # Without `aot_autograd` it takes no graph whose weights are inputs, as they are since torch
    # 2.12. The cache by name that it has is not used: the name does not depend on the weights.
    options: dict[str, Any] = {"aot_autograd": True, "config": config}
    return torch.compile(model, backend="openvino", options=options)


def _relax_dynamo(model: Any, setup: Setup) -> Any:
    import torch
    from tvm.relax.frontend.torch import relax_dynamo

    return torch.compile(model, backend=relax_dynamo())


def _relax(model: Any, setup: Setup) -> Any:
    import torch

    return torch.compile(model, backend="relax", options=setup.options or None)


def _relax_replayed(model: Any, setup: Setup) -> Any:
    import torch

    options = setup.options or None
    return torch.compile(model, backend="relax", mode="reduce-overhead", options=options)


@dataclass(frozen=True)
class Side:
    """One of the sides.

    Attributes:
        name: as in the table.
        compile: takes the module and the setup; gives what is called in its place.
        needs: a package without which there is no such side.
        modes: what it is asked to do.
        devices: where it is asked to.
    """

    name: str
    compile: Callable[[Any, Setup], Any]
    needs: str = "torch"
    modes: tuple[str, ...] = ("inference", "train", "autocast")
    devices: tuple[str, ...] = ("cpu", "cuda")

    @property
    def missing(self) -> str:
        """Why there is no such side here, or nothing."""
        if importlib.util.find_spec(self.needs) is None:
            return f"not installed: {self.needs}"
        return ""


OURS = "relax"
#: Eager through `torch.compile`: what its graphs and guards cost under any backend.
DYNAMO = "dynamo"
SIDES = {
    side.name: side
    for side in (
        Side("eager", _eager),
        Side(DYNAMO, _dynamo),
        Side("inductor", _inductor),
        Side("inductor-freezing", _freezing, modes=("inference", "autocast"), devices=("cpu",)),
        Side("inductor-reduce-overhead", _inductor_replayed, devices=("cuda",)),
        Side("openvino", _openvino, "openvino", ("inference",), ("cpu",)),
        Side("relax_dynamo", _relax_dynamo, "tvm", ("inference",), ("cpu",)),
        Side(OURS, _relax, "fx2relax"),
        Side(f"{OURS}-reduce-overhead", _relax_replayed, "fx2relax", devices=("cuda",)),
    )
}


def split(label: str) -> tuple[str, dict[str, Any]]:
    """A column's side and options: ``"relax library=none"`` is `relax` with an option.

    Raises:
        ValueError: for an option without a value.
    """
    name, *given = label.split()
    options = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not equals:
            raise ValueError(f"option {each!r} has no value: write {each}=VALUE")
        try:
            options[key] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            options[key] = value
    return name, options


def environment(threads: int, cache: str) -> dict[str, str]:
    """Environment variables of a worker: threads, and every cache in a folder of its own."""
    count = str(threads)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "TVM_NUM_THREADS": count,
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "FX2RELAX_CACHE_DIR": f"{cache}/fx2relax",
        "TVM_FFI_CACHE_DIR": f"{cache}/tvm-ffi",
        "XDG_CACHE_HOME": f"{cache}/user",
        "HF_HUB_OFFLINE": "1",
        "FX2RELAX_CUDA": "1",
        "PYTHONUNBUFFERED": "1",
        # What pip installs has bytecode; a clone has it once it was imported, unless told not to.
        "PYTHONDONTWRITEBYTECODE": "",
    }
