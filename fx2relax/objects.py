"""Object files that a module's kernels are in: they travel with the module until it is linked.

A function names its objects in an attribute, by digest, so that it keeps them through every pass
and in any module that it is put into. The module's own ``external_mods`` is what TVM's linker and
`relax.build` read.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fx2relax.compat import IRModule, relax, tvm
from fx2relax.errors import BuildFailure
from fx2relax.object_symbols import Symbols, read_symbols

#: A function's attribute: the digests of the objects that it calls into.
OBJECTS = "fx2relax.objects"
#: A function's attribute: the operators, by the symbols of their kernels.
OPERATORS = "fx2relax.operators"
_LINKED = "external_mods"
_known: dict[str, ObjectFile] = {}


class ObjectFile:
    """One object file.

    Attributes:
        name: what it is called in errors.
        data: its bytes.
        symbols: what it defines.
        link: flags for the linker.
        digest: of all that.
    """

    def __init__(self, name: str, data: bytes, link: Iterable[str] = ()) -> None:
        self.name = name
        self.data = data
        self.link = tuple(link)
        self.symbols: Symbols = read_symbols(data, name)
        said = hashlib.sha256(data)
        said.update("\0".join(["", *self.link]).encode())
        self.digest = said.hexdigest()[:20]
        _known.setdefault(self.digest, self)

    @functools.cached_property
    def module(self) -> Any:
        """It as TVM's linker takes it."""
        with tempfile.TemporaryDirectory(prefix="fx2relax-") as folder:
            path = Path(folder) / "kernel.o"
            path.write_bytes(self.data)
            return tvm.runtime.load_static_library(str(path), sorted(self.symbols.functions))


_collected: contextvars.ContextVar[dict[str, dict[str, str]] | None] = contextvars.ContextVar(
    "fx2relax_objects", default=None
)


@contextlib.contextmanager
def collecting() -> Iterator[dict[str, dict[str, str]]]:
    """What `used` is told of inside a ``with`` block: digest -> symbol -> operator."""
    found: dict[str, dict[str, str]] = {}
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def used(file: ObjectFile, symbol: str, operator: str) -> None:
    """Say that what is being imported calls a kernel of an object, for an operator."""
    found = _collected.get()
    if found is not None:
        found.setdefault(file.digest, {})[symbol] = operator


def carried(mod: Any, name: str, found: dict[str, dict[str, str]]) -> Any:
    """A module of which a function carries what was collected.

    Raises:
        BuildFailure: two objects define one symbol.
    """
    if not found:
        return mod
    check([_known[digest] for digest in found])
    operators = {f"{s}={o}": None for symbols in found.values() for s, o in symbols.items()}
    function = mod[name].with_attr(OBJECTS, list(found)).with_attr(OPERATORS, list(operators))
    mod = mod.clone() if hasattr(mod, "clone") else IRModule(mod.functions, attrs=mod.attrs)
    mod[name] = function
    return attached(mod)


def held(mod: Any) -> list[ObjectFile]:
    """The objects that a module's functions carry."""
    return [_known[digest] for digest in _digests(mod) if digest in _known]


def operators(mod: Any) -> list[str]:
    """The operators whose kernels are in the objects that a module's functions carry."""
    pairs = (p for f in _functions(mod) for p in _strings(f, OPERATORS))
    return list(dict.fromkeys(pair.partition("=")[2] for pair in pairs))


def attached(mod: Any) -> Any:
    """A module with the objects of all its functions where the linker looks for them.

    Raises:
        BuildFailure: two objects define one symbol, or the module comes from another process and
            its objects do not.
    """
    digests, files = _digests(mod), held(mod)
    there = list(mod.attrs.get(_LINKED, [])) if mod.attrs else []
    if len(files) < len(digests) and not there:
        raise BuildFailure(
            f"the kernels of {', '.join(operators(mod))} are in objects that this process does not "
            "have; import what defines them"
        )
    check(files)
    missing = [f.module for f in files if not any(f.module.same_as(m) for m in there)]
    return mod.with_attr(_LINKED, [*there, *missing]) if missing else mod


def check(files: Iterable[ObjectFile]) -> None:
    """Raise BuildFailure where two objects define one symbol; it names both."""
    owners: dict[str, ObjectFile] = {}
    for file in files:
        for symbol in sorted(file.symbols.strong):
            owner = owners.setdefault(symbol, file)
            if owner is not file:
                raise BuildFailure(
                    f"{owner.name} and {file.name} both define "
                    f"{symbol.removeprefix('__tvm_ffi_')!r}: one library can have it once"
                )


def _digests(mod: Any) -> list[str]:
    return list(dict.fromkeys(d for f in _functions(mod) for d in _strings(f, OBJECTS)))


def _functions(mod: Any) -> Iterator[Any]:
    for _, function in mod.functions_items():
        if isinstance(function, relax.Function):
            yield function


def _strings(function: Any, name: str) -> list[str]:
    attrs = function.attrs
    return [str(v) for v in attrs[name]] if attrs is not None and name in attrs else []
