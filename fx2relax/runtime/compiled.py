"""The package's C and C++ sources as shared libraries, compiled once on the user's machine.

A library is kept in the user's cache folder under a digest of all that goes into it, beside a
digest of its own bytes: another process finds it there, and a damaged file is compiled anew.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import filelock
import platformdirs
import torch

from fx2relax.compat import tvm_ffi

_log = logging.getLogger(__name__)
#: Set to 0, nothing is compiled and nothing compiled is used.
SWITCH = "FX2RELAX_NATIVE"
_SECONDS = 120
_CANDIDATES = {
    "c": ("CC", "cc", "gcc", "clang"),
    "c++": ("CXX", "c++", "g++", "clang++"),
}
_FLAGS = ("-O2", "-shared", "-fPIC")


def native_allowed() -> bool:
    """Whether compiled helpers may be used at all."""
    return os.environ.get(SWITCH, "1") != "0"


def load(
    name: str,
    sources: Sequence[Path],
    *,
    headers: Sequence[Path] = (),
    include: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> ctypes.CDLL | None:
    """Compile sources into one shared library, or take it from the cache, and load it.

    Safe in several processes at once: one compiles, the others wait for it.

    Args:
        name: what the library's file is called before its digest.
        sources: ``.c`` files, compiled with ``$CC`` (else cc, gcc or clang), or ``.cpp`` files,
            compiled with ``$CXX`` (else c++, g++ or clang++); not a mixture.
        headers: what the sources include of the package's own, for the digest.
        include: folders to search for other headers. They are taken to belong to PyTorch or
            TVM's FFI, whose versions are part of the digest.
        flags: further flags of the compiler.

    Returns:
        the library; None where `FX2RELAX_NATIVE` is 0, and, with one warning for a process,
        where there is no compiler or it fails.
    """
    if not native_allowed():
        return None
    compiler = _compiler("c++" if sources[0].suffix == ".cpp" else "c")
    if compiler is None:
        return None
    arguments = [*_FLAGS, *flags]
    key = _key(compiler, arguments, [*sources, *headers])
    # Libraries to link with are among the flags: what needs them comes first.
    folders = [f"-I{folder}" for folder in include]
    command = [*compiler, *folders, *map(str, sources), *arguments]
    try:
        return _cached(f"{name}-{key}", command)
    except (OSError, subprocess.SubprocessError) as error:
        _warn_failed(name, _reason(error))
        return None


def find_compiler(language: str) -> tuple[str, ...] | None:
    """The command of the user's compiler for ``"c"`` or ``"c++"``; None where there is none."""
    variable, *names = _CANDIDATES[language]
    chosen = shlex.split(os.environ.get(variable, ""))
    for words in (chosen, *([name] for name in names)):
        if words and (found := shutil.which(words[0])):
            return (found, *words[1:])
    return None


@functools.cache
def _compiler(language: str) -> tuple[str, ...] | None:
    found = find_compiler(language)
    if found is None:
        _warn_missing()
    return found


@functools.cache
def _warn_missing() -> None:
    _log.warning(
        "there is no C or C++ compiler ($CC, $CXX, gcc, clang): slower Python callbacks are used"
        " in place of native helpers; %s=0 asks for that, without this message",
        SWITCH,
    )


@functools.cache
def _warn_failed(name: str, reason: str) -> None:
    _log.warning("the native helper %r cannot be compiled, and is done without: %s", name, reason)


def _reason(error: Exception) -> str:
    output = getattr(error, "stderr", None) or b""
    text = output.decode(errors="replace").strip()
    return text[-2000:] or f"{type(error).__name__}: {error}"


def compiler_facts(command: Sequence[str]) -> list[str]:
    """What decides what a compiler makes of a source, as text."""
    program = Path(command[0]).resolve()
    status = program.stat()
    return [
        *command,
        f"{program} {status.st_size} {status.st_mtime_ns}",
        platform.system(),
        platform.machine(),
        tvm_ffi.__version__,
    ]


def _key(compiler: Sequence[str], flags: Sequence[str], files: Sequence[Path]) -> str:
    """A digest of everything that decides what the compiled library is."""
    parts = [*compiler_facts([*compiler, *flags]), torch.__version__]
    digest = hashlib.sha256("\0".join(parts).encode())
    for file in files:
        digest.update(b"\0" + file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:20]


def _cached(stem: str, command: Sequence[str]) -> ctypes.CDLL:
    """Load a library from the cache, after compiling it if it is not there whole."""
    folder = cache_folder()
    library = folder / f"{stem}.so"
    loaded = _loaded(library)
    if loaded is not None:
        return loaded
    with filelock.FileLock(folder / f"{stem}.lock", timeout=2 * _SECONDS):
        loaded = _loaded(library)  # another process may have been first
        if loaded is not None:
            return loaded
        if library.exists():
            _log.warning("%s is damaged and is compiled anew", library)
        _compile(command, library)
    loaded = _loaded(library)
    return ctypes.CDLL(str(library)) if loaded is None else loaded


def _loaded(library: Path) -> ctypes.CDLL | None:
    """The library, if its bytes are those that were written."""
    try:
        wanted = _digest_file(library).read_text()
        if hashlib.sha256(library.read_bytes()).hexdigest() == wanted:
            return ctypes.CDLL(str(library))
    except (OSError, UnicodeDecodeError):
        pass
    return None


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _compile(command: Sequence[str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        subprocess.run(
            [*command, "-o", str(built)], check=True, capture_output=True, timeout=_SECONDS
        )
        digest = _digest_file(built)
        digest.write_text(hashlib.sha256(built.read_bytes()).hexdigest())
        # Each is replaced whole. A reader between the two finds them unlike, and takes the lock.
        built.replace(library)
        digest.replace(_digest_file(library))


def cache_folder() -> Path:
    """The cache folder, or one for this process alone where the user's cannot be written to."""
    folder = platformdirs.user_cache_path("fx2relax")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return _own_folder()


@functools.cache
def _own_folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="fx2relax-")
    atexit.register(folder.cleanup)
    return Path(folder.name)
