"""The virtual machines that run an artifact's library, by TVM's runtime alone."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tvm_ffi

from fx2relax import tvm_runtime
from fx2relax.errors import ArtifactError
from fx2relax.tvm_runtime import Machine


@functools.cache
def tvm_version() -> str:
    """The version of the TVM that is installed.

    Raises:
        ArtifactError: none is.
    """
    try:
        return tvm_runtime.version()
    except ImportError:
        raise ArtifactError("Apache TVM is not installed: pip install apache-tvm") from None


@functools.cache
def start(kind: str) -> None:
    """Load TVM's runtime, for a kind of device ("cpu", "cuda").

    Raises:
        ArtifactError: TVM is not installed, or has no runtime for the device.
    """
    _choose_threads()
    try:
        tvm_runtime.start(kind)
    except ImportError:
        raise ArtifactError("Apache TVM is not installed: pip install apache-tvm") from None
    except OSError as error:
        raise ArtifactError(f"TVM's runtime for {kind} cannot be loaded: {error}") from None


def _choose_threads() -> None:
    """One thread for each core of this process; TVM takes half of the machine's, and binds them.

    The pool reads these when a thread first runs a parallel loop.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ.setdefault("TVM_NUM_THREADS", str(_cores()))
    os.environ.setdefault("TVM_BIND_THREADS", "0")


def _cores() -> int:
    """How many cores this process may use; two threads of one core count once."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    own = os.sched_getaffinity(0)
    cores = set()
    for cpu in own:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(path.read_text())
        except OSError:
            return len(own)
    return len(cores)


def device(name: Any) -> Any:
    """A device of its name ("cpu", "cuda:1"), or of a TVM or DLPack device.

    Raises:
        ArtifactError: there is no such device.
    """
    try:
        return tvm_runtime.device(name)
    except Exception as error:
        raise ArtifactError(f"there is no device {name!r}: {error}") from None


class Machines:
    """The virtual machines of one library: each is used by one call at a time.

    Args:
        library: the bytes of a shared library.
        name: of its file, for messages.
        where: the device.

    Raises:
        ArtifactError: it cannot be loaded here.
    """

    def __init__(self, library: bytes, name: str, where: Any) -> None:
        self._where = where
        self._name = name
        self._module = _loaded(library, name)
        self._idle = [self._new()]

    @contextlib.contextmanager
    def take(self) -> Iterator[Machine]:
        """A machine that nobody else uses meanwhile; what it returned is let go of afterwards."""
        try:
            machine = self._idle.pop()
        except IndexError:
            machine = self._new()
        try:
            yield machine
        finally:
            machine.release()
            self._idle.append(machine)

    def has(self, function: str) -> bool:
        """Whether the library has a Relax function."""
        machine = self._idle[-1] if self._idle else self._new()
        return bool(machine.module.implements_function(function))

    def _new(self) -> Machine:
        try:
            return Machine(self._module, self._where)
        except Exception as error:
            raise ArtifactError(
                f"{self._name} cannot be run here: {_first(error)}. A library that calls functions"
                " of PyTorch or of a Python module is not one that runs without them: import"
                ' what defines them first, or export with library="none"'
            ) from error


def _loaded(library: bytes, name: str) -> Any:
    """The module in a library's bytes.

    They are loaded from a file of this process alone, which is gone afterwards: the linker takes
    one file that is loaded twice for one library, and nothing can happen to it between the check
    of the bytes and their use.
    """
    with tempfile.TemporaryDirectory(prefix="fx2relax-") as folder:
        path = Path(folder) / "library.so"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(library)
        try:
            return tvm_ffi.load_module(str(path))
        except Exception as error:
            raise ArtifactError(f"{name} cannot be loaded: {_first(error)}") from error


def _first(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0][:500] if text else type(error).__name__
