"""Names of a package that is imported when one of them is first used.

A compiled program that is found on disk runs without TVM's compiler, whose import takes most of a
second and a hundred megabytes. Modules that a warm start imports as well name TVM by `Late`.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from fx2relax import tvm_import


class Late:
    """What a module holds under a name, or the module itself.

    It is called, asked for attributes and given to `isinstance` as what it stands for. Until the
    package is imported by someone, its attributes are late as well: a table may hold them. A call
    imports the package; `isinstance` does not, as there can be no instance yet.

    Args:
        module: the module's full name.
        names: attributes, each of the one before.
    """

    __slots__ = ("_found", "_module", "_names")

    def __init__(self, module: str, *names: str) -> None:
        self._module, self._names = module, names
        self._found: Any = None

    def found(self) -> Any:
        """What this stands for; imports the package."""
        if self._found is None:
            if self._package == "tvm":
                tvm_import.load()
            value: Any = importlib.import_module(self._module)
            for name in self._names:
                value = getattr(value, name)
            self._found = value
        return self._found

    @property
    def _package(self) -> str:
        return self._module.partition(".")[0]

    def _known(self) -> bool:
        return self._found is not None or self._package in sys.modules

    def __getattr__(self, name: str) -> Any:
        if self._known() or name.startswith("__"):
            return getattr(self.found(), name)
        return Late(self._module, *self._names, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.found()(*args, **kwargs)

    def __instancecheck__(self, instance: Any) -> bool:
        return self._known() and isinstance(instance, self.found())

    def __subclasscheck__(self, subclass: type) -> bool:
        return self._known() and issubclass(subclass, self.found())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.found(),)

    def __repr__(self) -> str:
        return f"<late {'.'.join((self._module, *self._names))}>"
