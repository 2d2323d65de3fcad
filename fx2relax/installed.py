"""The packages that this one is built on: which versions, whether they are there, what to do."""

from __future__ import annotations

import importlib
import importlib.metadata
import re

from fx2relax.errors import InstallationError

Version = tuple[int, ...]
#: From, and up to but not including; a test holds them to what the package itself requires.
SUPPORTED: dict[str, tuple[Version, Version | None]] = {
    "torch": ((2, 11), (2, 16)),
    "apache-tvm": ((0, 27), (0, 28)),
    "numpy": ((0,), None),
}
#: Packages by the names they are imported by, where these are others.
_BROUGHT_BY = {"tvm": "apache-tvm", "tvm_ffi": "apache-tvm", "functorch": "torch"}


def require() -> None:
    """See to it that PyTorch and TVM are there; cheap, as TVM's compiler is not imported.

    Raises:
        InstallationError: one is missing, older than what is supported, or broken.
    """
    for name in ("torch", "apache-tvm"):
        if unsupported(name, version(name)) == "old":
            raise _failure(name, ImportError(name))
    for module in ("torch", "tvm_ffi"):
        try:
            importlib.import_module(module)
        except Exception as error:  # a library that does not load may raise anything
            raise explained(error, of=_BROUGHT_BY.get(module, module)) from error


def explained(error: Exception, of: str = "") -> InstallationError:
    """What an import that failed means.

    Args:
        error: what it raised.
        of: the package that was to be imported, if nothing else is missing.
    """
    if isinstance(error, InstallationError):
        return error
    missing = (getattr(error, "name", None) or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and missing not in ("", "fx2relax"):
        of = _BROUGHT_BY.get(missing, missing)
    return _failure(of, error)


def _failure(name: str, error: Exception) -> InstallationError:
    """The first of what is wrong with a package, or with any of them for an empty name."""
    for each in [name] if name else SUPPORTED:
        there = version(each)
        if there is None and isinstance(error, ModuleNotFoundError):
            return _error(f"{each} is not installed", f"pip install {wanted(each)}")
        problem = unsupported(each, there)
        if problem:
            which = "too old" if problem == "old" else "newer than what is supported"
            return _error(f"{each} {there} is {which}", f"pip install {wanted(each)}")
    said = " ".join(f"{type(error).__name__}: {error}".split())
    again = wanted(name) if name else f"{wanted('torch')} {wanted('apache-tvm')}"
    what = f"{name} {version(name) or ''}".rstrip() if name else "what this package is built on"
    return _error(f"{what} cannot be imported: {said}", f"pip install --force-reinstall {again}")


def _error(what: str, mend: str) -> InstallationError:
    return InstallationError(
        f"{what}\n  {mend}\nmends it; `fx2relax doctor` looks at all of the installation"
    )


def wanted(name: str) -> str:
    """A package as `pip install` takes it, within the versions that are supported."""
    least, below = SUPPORTED.get(name, ((), None))
    if below is None:
        return name
    return f"'{name}>={_dotted(least)},<{_dotted(below)}'"


def unsupported(name: str, version: str | None) -> str:
    """``"old"``, ``"new"``, or nothing where a version is supported or unknown."""
    least, below = SUPPORTED.get(name, ((), None))
    found = numbers(version or "")
    if not found:
        return ""
    if found < least:
        return "old"
    return "new" if below is not None and found >= below else ""


def version(name: str) -> str | None:
    """The version of a package that pip knows of."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> Version:
    """``2.13.0+cpu`` as (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
