"""What TVM's Python looks at twice, once: for the process that compiles, which is ours alone.

Lowering walks through containers by the hundred thousand, each step of which asks for the length
and checks the index; each `isinstance` asks a registry of abstract classes; and every step of a
schedule has the types of its arguments looked at, which is a third of its time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tvm_ffi
from tvm.s_tir import Schedule

_size, _element = (tvm_ffi.get_global_func(f"ffi.Array{name}") for name in ("Size", "GetItem"))


def install() -> None:
    """Change TVM's classes in this process, for good."""
    tvm_ffi.Array.__iter__ = _elements
    # Their classes are abstract ones of Python's, in which nothing is registered.
    kind: Any = type(tvm_ffi.Object)
    kind.__instancecheck__ = type.__instancecheck__
    for name, method in list(vars(Schedule).items()):
        unchecked = getattr(method, "__wrapped__", None)
        if unchecked is not None:
            setattr(Schedule, name, unchecked)


def elements(array: Any) -> list[Any]:
    """What a `tvm_ffi.Array` holds, in a third of the time that ``list(array)`` takes."""
    return [_element(array, n) for n in range(_size(array))]


def _elements(array: Any) -> Iterator[Any]:
    return iter(elements(array))
