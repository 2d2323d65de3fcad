"""TVM's runtime without its compiler, and the virtual machines that run a library.

``import tvm`` loads a compiler that nothing here needs: it takes ten times as long as the rest.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import tvm_ffi

#: Frees what a machine's last call returned; `pipeline.build` adds it to every library.
RELEASE = "fx2relax_release"
_NAIVE, _POOLED = 1, 2
_CPU = 1


@functools.cache
def version() -> str:
    """The version of the TVM that is installed.

    Raises:
        ImportError: none is.
    """
    try:
        return importlib.metadata.version("apache-tvm")
    except importlib.metadata.PackageNotFoundError:
        return str(importlib.import_module("tvm").__version__)


@functools.cache
def start(kind: str) -> None:
    """Load TVM's runtime, for a kind of device ("cpu", "cuda").

    Raises:
        ImportError: TVM is not installed.
        OSError: it has no runtime for the device.
    """
    if "tvm" in sys.modules:
        return
    folder = _libraries()
    if folder is None:
        importlib.import_module("tvm")
        return
    ctypes.CDLL(str(folder / "libtvm_runtime.so"), ctypes.RTLD_GLOBAL)
    for part in ("extra", kind):  # the first has what sorts
        library = folder / f"libtvm_runtime_{part}.so"
        if library.exists():
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def _libraries() -> Path | None:
    """Where TVM's libraries are, as `tvm.libinfo` finds them; None where it is laid out anew."""
    found = importlib.util.find_spec("tvm")
    roots = list(found.submodule_search_locations or ()) if found is not None else []
    chosen = os.environ.get("TVM_LIBRARY_PATH")
    for folder in (*([Path(chosen)] if chosen else []), *(Path(root) / "lib" for root in roots)):
        if (folder / "libtvm_runtime.so").exists():
            return folder
    return None


class Machine:
    """One virtual machine, which one thread at a time may enter.

    Args:
        module: of a library that `relax.build` made.
        where: the device.
        pooled: whether it takes memory from the pool that all machines share and that never gives
            any back.
    """

    def __init__(self, module: Any, where: Any, *, pooled: bool = True) -> None:
        self.module = module["vm_load_executable"]()
        kinds = [(where.dlpack_device_type(), where.index)]
        if kinds[0][0] != _CPU:
            kinds.append((_CPU, 0))  # sizes are worked out there
        allocator = _POOLED if pooled else _NAIVE
        self.module["vm_initialization"](*(n for kind in kinds for n in (*kind, allocator)))
        self._functions: dict[str, Any] = {}
        known = self.module.implements_function(RELEASE)
        #: Lets go of what the last call returned.
        self.release: Any = self.module[RELEASE] if known else lambda: None

    def __getitem__(self, name: str) -> Any:
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = self.module[name]
        return function


def has_kind(error: BaseException, kind: str) -> bool:
    """Whether TVM raised an error of a kind, for which Python has a class once TVM is imported."""
    return getattr(getattr(error, "__tvm_ffi_error__", None), "kind", "") == kind


def device(name: Any) -> Any:
    """A device of its name ("cpu", "cuda:1"), or of a TVM or DLPack device.

    Raises:
        what `tvm_ffi.device` raises where there is none of the name.
    """
    return name if isinstance(name, tvm_ffi.Device) else tvm_ffi.device(str(name))
