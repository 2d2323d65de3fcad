"""The options of the backend: one frozen dataclass, checked on the way in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from fx2relax.errors import OptionError
from fx2relax.tune_options import Tune

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_TUNED = MODES[2:]
_CHOICES = {"on_unsupported": ("torch", "raise"), "library": ("auto", "torch", "none")}


@dataclasses.dataclass(frozen=True)
class Options:
    """What `torch.compile(..., backend="relax", options={...})` takes.

    Attributes:
        on_unsupported: ``"torch"`` runs an operator without a converter in PyTorch, and a graph
            that TVM cannot build in eager with a warning; ``"raise"`` raises in both cases.
        library: ``"torch"`` sends products, convolutions and attention to PyTorch's own kernels;
            ``"none"`` generates every kernel; ``"auto"`` is ``"torch"``, or what is generated
            where a graph's first calls show that this is faster (and `never_slower` allows them
            to be timed).
        call_function_map: converters for Python functions, Tensor methods and ATen overloads,
            for this call only.
        call_module_map: the same for module classes.
        cache: whether compiled programs are kept on disk and found there.
        cache_size: how many bytes they may take; ``$FX2RELAX_CACHE_SIZE`` or 1 GiB when left out.
        never_slower: whether a graph that eager runs faster runs in eager, see `never_slower`.
        tune: how the kernels are tuned, a dict as `tune_options.Tune` takes it; None for not at
            all, unless the mode is ``"max-autotune"`` or the like. Needs `never_slower`, which
            times the tuned program before it stays.
        mode: the mode of `torch.compile`.
    """

    on_unsupported: str = "torch"
    library: str = "auto"
    call_function_map: Mapping[Any, Callable[..., Any]] | None = None
    call_module_map: Mapping[Any, Callable[..., Any]] | None = None
    cache: bool = True
    cache_size: int | None = None
    never_slower: bool = True
    tune: Tune | None = None
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
        for key in ("cache", "never_slower"):
            if not isinstance(given.get(key, True), bool):
                raise OptionError(f"option {key}={given[key]!r}; it takes True or False")
        size = given.get("cache_size")
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
            raise OptionError(f"option cache_size={size!r}; it takes a number of bytes")
        if given.get("tune") is not None:
            given["tune"] = Tune.make(given["tune"])
            if not given.get("never_slower", True):
                raise OptionError(
                    "option tune needs never_slower=True, by which a tuned program that is not "
                    "faster is not kept"
                )
        elif mode in _TUNED and given.get("never_slower", True):
            given["tune"] = Tune()
        return cls(**given, mode=mode or "default")

    @property
    def converters(self) -> dict[Any, Callable[..., Any]]:
        """Both maps as one."""
        return {**(self.call_function_map or {}), **(self.call_module_map or {})}
