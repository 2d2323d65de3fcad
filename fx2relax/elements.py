"""Buffers whose elements are read and written like those of a list."""

from __future__ import annotations

from typing import Any

from fx2relax.compat import T, tirx


class Elements:
    """What a kernel's statements see of a buffer.

    TVM's own `buffer_proxy` first asks an index whether it can be iterated. An expression says no
    by an error in C++, whose stack trace takes the names of all functions of the process: half a
    second and 50 MB, the first time.

    Args:
        buffer: to be indexed by an expression for each axis, or by one in the order of memory.
    """

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self.dtype, self.shape, self.name = buffer.dtype, buffer.shape, buffer.name

    def __getitem__(self, index: Any) -> Any:
        return tirx.BufferLoad(self._buffer, self._place(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        T.buffer_store(self._buffer, value, self._place(index))

    def _place(self, index: Any) -> list[Any]:
        indices = list(index) if isinstance(index, (tuple, list)) else [index]
        if len(indices) == len(self.shape):
            return indices
        (rest,) = indices
        places = []
        for size in reversed(self.shape[1:]):
            places.append(rest % size)
            rest = rest // size
        return [*([rest] if len(self.shape) else []), *reversed(places)]
