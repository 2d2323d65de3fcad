"""How TVM's compiler is imported: in half the time that ``import tvm`` takes beside PyTorch.

TVM's first error reads the symbols of all libraries that are loaded, PyTorch's too, for its
backtrace: 0.7 s. An import of TVM makes dozens of errors, and catches them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from fx2relax import installed
from fx2relax.collecting import paused

_lock = threading.Lock()
#: Imported before the library is loaded that has its types; TVM goes on without.
_DISTRIBUTED = "tvm.runtime.disco"
#: Whether TVM loads what its kinds of device need; it asks for operators that there are not.
_BACKENDS = "TVM_DEVICE_BACKEND_AUTOLOAD"
_PRINTED = "TScriptPrinterName"


def load() -> None:
    """Import TVM, once; what is there then is what ``import tvm`` brings.

    Raises:
        InstallationError: TVM is not installed, or cannot be imported.
    """
    if "tvm" in sys.modules:
        return
    try:
        _load()
    except Exception as error:  # libraries that do not load, names that are no more
        raise installed.explained(error, of="apache-tvm") from error


def _load() -> None:
    with _lock, paused():
        if "tvm" in sys.modules:
            return
        wanted = os.environ.get(_BACKENDS)
        sys.modules[_DISTRIBUTED] = None  # type: ignore[assignment]
        os.environ[_BACKENDS] = "0"
        try:
            importlib.import_module("tvm")
        finally:
            del sys.modules[_DISTRIBUTED]
            del os.environ[_BACKENDS]
            if wanted is not None:
                os.environ[_BACKENDS] = wanted
        backends: Any = importlib.import_module("tvm.backend._autoload_backends")
        backends._AUTO_LOAD_DONE = False
        with _without_errors(importlib.import_module("tvm.ir.op")):
            backends._autoload_backends()


@contextlib.contextmanager
def _without_errors(ops: Any) -> Iterator[None]:
    """Let it be Python that raises for an operator that there is not, as TVM otherwise would.

    The names under which operators are printed are registered once; again is an error too.
    """
    operators, functions = ops.Op, ops._ffi_api
    get, register = operators.get, functions.RegisterOpAttr
    names = frozenset(operators.list_op_names())

    def found(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"there is no operator {name}")
        return get(name)

    def registered(name: str, key: str, value: Any, level: int) -> None:
        if key != _PRINTED or name not in names or get(name).get_attr(key) != value:
            register(name, key, value, level)

    operators.get, functions.RegisterOpAttr = staticmethod(found), registered
    try:
        yield
    finally:
        operators.get, functions.RegisterOpAttr = staticmethod(get), register
