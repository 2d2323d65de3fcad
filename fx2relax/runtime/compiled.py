"""The package's C and C++ sources as shared libraries, compiled once on the user's machine.

A library is kept in the user's cache folder under a digest of all that goes into it, beside a
digest of its own bytes: another process finds it there, and a damaged file is compiled anew.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import filelock
import torch

from fx2relax import disk
from fx2relax.compat import tvm_ffi

from .compilers import find_compiler

_log = logging.getLogger(__name__)
#: Set to 0, nothing is compiled and nothing compiled is used.
SWITCH = "FX2RELAX_NATIVE"
_SECONDS = 120
_LIMIT = 256 << 20
_KEPT = (".so", ".sha256", ".o", ".json", ".lock")
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
    folder = cache_folder(f"{stem}.so")
    library = folder / f"{stem}.so"
    loaded = _loaded(library)
    if loaded is not None:
        return loaded
    with locked(folder, stem, _SECONDS):
        loaded = _loaded(library)  # another process may have been first
        if loaded is not None:
            return loaded
        if library.exists():
            _log.warning("%s is damaged and is compiled anew", library)
        return _compile(command, library)


def _loaded(library: Path) -> ctypes.CDLL | None:
    """The library, if its bytes are those that were written, by this user."""
    try:
        wanted = disk.read_own(_digest_file(library)).decode()
        content = disk.read_own(library)
        if hashlib.sha256(content).hexdigest() != wanted:
            return None
        loaded = _opened(content, library)
    except (OSError, UnicodeDecodeError):
        return None
    disk.used(library)
    return loaded


def _opened(content: bytes, library: Path) -> ctypes.CDLL:
    """Load what was read, from a file that nobody can have replaced since; it stays loaded."""
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix="fx2relax-") as folder:
        own = Path(folder) / library.name
        own.write_bytes(content)
        return ctypes.CDLL(str(own))
    # The temporary folder is full, or nothing in it may be run.
    return ctypes.CDLL(str(library))


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _compile(command: Sequence[str], library: Path) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="fx2relax-") as folder:
        built = Path(folder) / library.name
        subprocess.run(
            [*command, "-o", str(built)], check=True, capture_output=True, timeout=_SECONDS
        )
        content = built.read_bytes()
    try:
        # Each is replaced whole. Who reads between the two finds them unlike, and takes the lock.
        disk.write_own(library, content)
        disk.write_own(_digest_file(library), hashlib.sha256(content).hexdigest().encode())
        keep_bounded(library.parent)
    except OSError as error:
        disk.warn_unusable(error)
    return _opened(content, library)


def cache_folder(name: str) -> Path:
    """The folder to find a file in or to put it, the user's own or one for this process alone."""
    folder = disk.native()
    try:
        disk.own_folder(folder)
        if not os.access(folder, os.W_OK) and not (folder / name).exists():
            raise PermissionError(f"{folder} cannot be written to")
    except OSError as error:
        disk.warn_unusable(error)
        return _own_folder()
    return folder


def keep_bounded(folder: Path) -> None:
    """Let what was compiled take no more than a limit; what was used longest ago goes first."""
    disk.bound(folder, _LIMIT, lambda path: path.suffix in _KEPT)


@contextlib.contextmanager
def locked(folder: Path, stem: str, seconds: float) -> Iterator[None]:
    """One process at a time compiles a file of that name; the others wait for it."""
    try:
        lock = filelock.FileLock(folder / f"{stem}.lock", timeout=2 * seconds)
        lock.acquire()
    except (OSError, NotImplementedError) as error:
        # Two that compile one file disturb each other less than one that does not go on.
        _log.info("%s is compiled without a lock: %s", stem, error)
        yield
        return
    try:
        yield
    finally:
        lock.release()


@functools.cache
def _own_folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="fx2relax-")
    atexit.register(folder.cleanup)
    return Path(folder.name)
