"""What converts what: from a node's own target to the function that gives its Relax form."""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import importlib.metadata
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as Promotion

from fx2relax.errors import RegistrationError, target_name
from fx2relax.locks import own

__all__ = ["Converter", "Promotion", "converts", "lookup", "overrides", "registered"]

Target = Any  # an OpOverload, a Python function, a Tensor method's name, or a module class
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Converter:
    """A converter and what was declared when it was registered.

    Attributes:
        target: the operator object, Python function, Tensor method name or module class.
        function: takes the target's own arguments, returns a Relax expression or a tuple.
        promote: how the tensors and scalars among the positional arguments are promoted before
            the call, as `torch._prims_common` names it; None leaves them as they are.
        promote_args: names of the parameters that promotion touches; None means every
            positional one.
        exact_scalars: Python numbers keep their full precision in half-precision calls, as in
            eager's mul and div; other operators round them to the common dtype first.
        source: the module that registered it.
    """

    target: Target
    function: Callable[..., Any]
    promote: Promotion | None = None
    promote_args: tuple[str, ...] | None = None
    source: str = ""
    exact_scalars: bool = False

    @property
    def kind(self) -> str:
        """``"overload"``, ``"function"``, ``"method"`` or ``"module"``."""
        return kind_of(self.target)


_OURS = "fx2relax.converters."  # modules that converters ship in
_shipped: dict[Target, Converter] = {}
_complex: dict[Target, Converter] = {}
_scopes: contextvars.ContextVar[tuple[dict[Target, Converter], ...]] = contextvars.ContextVar(
    "fx2relax_overrides", default=()
)


_watched: contextvars.ContextVar[list[Converter] | None] = contextvars.ContextVar(
    "fx2relax_watched", default=None
)


_loading = own(sys.modules[__name__], "_loading", threading.RLock)
_loaded = False


def load() -> None:
    """Import the converters that ship and those of other packages, once."""
    global _loaded
    with _loading:
        if not _loaded:
            _loaded = True
            try:
                importlib.import_module("fx2relax.converters")
                load_third_party()
            except (KeyboardInterrupt, SystemExit):  # whoever asks next loads them all
                _unload()
                raise


def _unload() -> None:
    """Forget what a load has left that was cut off."""
    global _loaded
    for name in [n for n in sys.modules if f"{n}.".startswith("fx2relax.converters.")]:
        del sys.modules[name]
    _shipped.clear()
    _complex.clear()
    _loaded = False


def kind_of(target: Target) -> str:
    """What sort of FX target this is; raises RegistrationError for what is none."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return "overload"
    if isinstance(target, str):
        return "method"
    if isinstance(target, type) and issubclass(target, torch.nn.Module):
        return "module"
    if isinstance(target, torch._ops.OpOverloadPacket):
        names = ", ".join(f"{target}.{name}" for name in target.overloads())
        raise RegistrationError(f"{target} is a family of overloads; name one: {names}")
    if callable(target):
        return "function"
    raise RegistrationError(f"{target!r} is no operator, function, method name or module class")


def converts(
    *targets: Target,
    promote: Promotion | None = None,
    promote_args: tuple[str, ...] | None = None,
    exact_scalars: bool = False,
    complex_numbers: bool = False,
    override: bool = False,
) -> Callable[[Function], Function]:
    """Register a function as the converter of one or more targets.

    Args:
        targets: ATen overloads (``torch.ops.aten.add.Tensor``), Python functions
            (``torch.relu``), Tensor method names (``"relu"``) or module classes
            (``torch.nn.Linear``). All others than overloads keep their node whole: PyTorch does
            not take it apart before the converter is called.
        promote: PyTorch's promotion for the positional arguments; see `Converter`.
        promote_args: restricts the promotion to these parameters.
        exact_scalars: keep Python numbers at full precision; see `Converter`.
        complex_numbers: for the calls that take or give complex tensors, which have converters of
            their own: a complex tensor is a `fx2relax.complexes.Complex`.
        override: replace the converter that the target has.

    The decorated function takes what the target takes: the overload's schema, the function's
    arguments, the method's (the tensor first), or ``(module, *inputs)``, where ``module.weight``
    and every other parameter or buffer is a Relax variable and every other attribute is the
    module's own. It returns a Relax expression, or a tuple of them.

    Returns:
        a decorator that returns the function as it is.

    Raises:
        RegistrationError: (a ValueError) a target is taken (and ``override`` is False) or is none.
    """
    if not targets:
        raise RegistrationError("converts() needs at least one target")
    table = _complex if complex_numbers else _shipped

    def register(function: Function) -> Function:
        source = getattr(function, "__module__", "")
        if not source.startswith(_OURS):
            load()  # so that one that ships is found, and is not put over this one later
        for target in targets:
            kind_of(target)
            if target in table and not override:
                raise RegistrationError(
                    f"{target_name(target)} has a converter already, from "
                    f"{table[target].source}; pass override=True to replace it"
                )
            table[target] = Converter(
                target, function, promote, promote_args, source, exact_scalars
            )
        return function

    return register


def lookup(target: Target) -> Converter | None:
    """The converter of a target: the innermost override first, then the registered one."""
    load()
    for scope in reversed(_scopes.get()):
        if target in scope:
            return _seen(scope[target])
    return _seen(_shipped.get(target)) if _hashable(target) else None


def lookup_complex(target: Target) -> Converter | None:
    """The converter of a target's calls that take or give complex tensors."""
    load()
    return _seen(_complex.get(target)) if _hashable(target) else None


def _seen(found: Converter | None) -> Converter | None:
    watched = _watched.get()
    if watched is not None and found is not None:
        watched.append(found)
    return found


@contextlib.contextmanager
def watched() -> Iterator[list[Converter]]:
    """The converters that are looked up inside a ``with`` block, in order."""
    found: list[Converter] = []
    before = _watched.get()
    try:  # Ctrl-C may come between any two lines
        _watched.set(found)
        yield found
    finally:
        _watched.set(before)


def _hashable(target: Target) -> bool:
    try:
        hash(target)
    except TypeError:
        return False
    return True


def registered() -> Mapping[Target, Converter]:
    """Every converter in force, overrides included."""
    load()
    merged = dict(_shipped)
    for scope in _scopes.get():
        merged.update(scope)
    return merged


def shipped(converter: Converter) -> bool:
    """Whether a converter is one of this package's and no user's."""
    return converter.source.startswith(_OURS)


def foreign() -> dict[Target, Converter]:
    """The converters in force that are not this package's; those are loaded only beside any."""
    if not _loaded and not any(_scopes.get()) and not _third_party():
        return {}  # whoever registers one loads ours first
    return {t: c for t, c in registered().items() if not shipped(c)}


def kept_whole() -> dict[Target, Converter]:
    """The converters whose nodes must survive capture: all but those of ATen overloads.

    Those that ship are all of overloads.
    """
    return {t: c for t, c in foreign().items() if c.kind != "overload"}


@contextlib.contextmanager
def overrides(mapping: Mapping[Target, Callable[..., Any]] | None) -> Iterator[None]:
    """Put other converters in force inside a ``with`` block.

    Args:
        mapping: target -> converter function. It holds for graphs imported or compiled inside
            the block; `torch.compile` compiles at the first call.

    Raises:
        RegistrationError: (a ValueError) a target is none.
    """
    scope = {}
    for target, function in (mapping or {}).items():
        kind_of(target)
        scope[target] = Converter(target, function, source=getattr(function, "__module__", ""))
    before = _scopes.get()
    try:
        _scopes.set((*before, scope))
        yield
    finally:
        _scopes.set(before)


def _third_party() -> importlib.metadata.EntryPoints:
    return importlib.metadata.entry_points(group="fx2relax.converters")


def load_third_party() -> None:
    """Import the modules that other packages name in the group ``fx2relax.converters``."""
    for entry in _third_party():
        try:
            entry.load()
        except Exception as error:
            raise RegistrationError(
                f"the converters of {entry.name} ({entry.value}) could not be loaded: {error}"
            ) from error


def signature(converter: Converter) -> inspect.Signature:
    """The parameters that a converter takes."""
    return inspect.signature(converter.function)
