"""TVM's runtime without its compiler, and the virtual machines that run a library.

``import tvm`` loads a compiler that nothing here needs: it takes ten times as long as the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tvm_ffi

from fx2relax.errors import ArtifactError

#: Frees what the machine's last call returned; `pipeline.build` adds it to every library.
_RELEASE = "fx2relax_release"
_POOLED = 2
_CPU = 1


@functools.cache
def tvm_version() -> str:
    """The version of the TVM that is installed.

    Raises:
        ArtifactError: none is.
    """
    try:
        return importlib.metadata.version("apache-tvm")
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        import tvm
    except ImportError:
        raise ArtifactError("Apache TVM is not installed: pip install apache-tvm") from None
    return str(tvm.__version__)


@functools.cache
def start(kind: str) -> None:
    """Load TVM's runtime, for a kind of device ("cpu", "cuda").

    Raises:
        ArtifactError: TVM is not installed, or has no runtime for the device.
    """
    _choose_threads()
    if "tvm" in sys.modules:
        return
    folder = _libraries()
    if folder is None:
        tvm_version()
        importlib.import_module("tvm")
        return
    ctypes.CDLL(str(folder / "libtvm_runtime.so"), ctypes.RTLD_GLOBAL)
    extra = folder / f"libtvm_runtime_{kind}.so"
    if kind != "cpu" and extra.exists():
        try:
            ctypes.CDLL(str(extra), ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise ArtifactError(f"TVM's runtime for {kind} cannot be loaded: {error}") from None


def _libraries() -> Path | None:
    """Where TVM's libraries are, as `tvm.libinfo` finds them; None where it is laid out anew."""
    found = importlib.util.find_spec("tvm")
    roots = list(found.submodule_search_locations or ()) if found is not None else []
    chosen = os.environ.get("TVM_LIBRARY_PATH")
    for folder in (*([Path(chosen)] if chosen else []), *(Path(root) / "lib" for root in roots)):
        if (folder / "libtvm_runtime.so").exists():
            return folder
    return None


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
    if isinstance(name, tvm_ffi.Device):
        return name
    try:
        return tvm_ffi.device(str(name))
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
            return Machine(self._module["vm_load_executable"](), self._where)
        except Exception as error:
            raise ArtifactError(
                f"{self._name} cannot be run here: {_first(error)}. A library that calls functions"
                " of PyTorch or of a Python module is not one that runs without them: import"
                ' what defines them first, or export with library="none"'
            ) from error


class Machine:
    """One virtual machine."""

    def __init__(self, module: Any, where: Any) -> None:
        self.module = module
        kinds = [(where.dlpack_device_type(), where.index)]
        if kinds[0][0] != _CPU:
            kinds.append((_CPU, 0))  # sizes are worked out there
        module["vm_initialization"](*(n for kind in kinds for n in (*kind, _POOLED)))
        self._functions: dict[str, Any] = {}
        self.release = module[_RELEASE] if module.implements_function(_RELEASE) else lambda: None

    def __getitem__(self, name: str) -> Any:
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = self.module[name]
        return function


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
