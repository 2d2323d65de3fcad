"""The options of the backend: one frozen dataclass, checked on the way in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from fx2relax.errors import OptionError

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_CHOICES = {"on_unsupported": ("torch", "raise"), "library": ("torch", "none")}


@dataclasses.dataclass(frozen=True)
class Options:
    """What `torch.compile(..., backend="relax", options={...})` takes.

    Attributes:
        on_unsupported: ``"torch"`` runs an operator without a converter in PyTorch, and a graph
            that TVM cannot build in eager with a warning; ``"raise"`` raises in both cases.
        library: ``"torch"`` sends products, convolutions and attention to PyTorch's own kernels;
            ``"none"`` generates every kernel.
        call_function_map: converters for Python functions, Tensor methods and ATen overloads,
            for this call only.
        call_module_map: the same for module classes.
        mode: the mode of `torch.compile`.
    """

    on_unsupported: str = "torch"
    library: str = "torch"
    call_function_map: Mapping[Any, Callable[..., Any]] | None = None
    call_module_map: Mapping[Any, Callable[..., Any]] | None = None
    mode: str = "default"

    @classmethod
    def make(cls, options: Mapping[str, Any] | None = None, mode: str | None = None) -> Options:
        """Options from a dict. Raises OptionError for an unknown key or value."""
        given = dict(options or {})
        known = [f.name for f in dataclasses.fields(cls) if f.name != "mode"]
        unknown = [key for key in given if key not in known]
        if unknown:
            raise OptionError(
                f"unknown option{'s' if len(unknown) > 1 else ''} "
                f"{', '.join(map(repr, unknown))}; known options: {', '.join(known)}"
            )
        if mode is not None and mode not in MODES:
            raise OptionError(f"unknown mode {mode!r}; known modes: {', '.join(MODES)}")
        for key, choices in _CHOICES.items():
            if key in given and given[key] not in choices:
                raise OptionError(
                    f"option {key}={given[key]!r}; it takes {' or '.join(map(repr, choices))}"
                )
        return cls(**given, mode=mode or "default")

    @property
    def converters(self) -> dict[Any, Callable[..., Any]]:
        """Both maps as one."""
        return {**(self.call_function_map or {}), **(self.call_module_map or {})}
