"""How a compiled Relax function is called: with the memory of its results, and without the rest."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

#: What the name of the function that returns a function's constants ends in.
CONSTANTS = "_constants"
#: A size: a number, or Python's text for one over the names of `Calling.symbols`.
Size = int | str


@dataclass(frozen=True)
class Given:
    """A result that the function writes into memory that its caller hands over.

    Attributes:
        index: where it stood among the results.
        shape: its sizes.
        dtype: TVM's name of its dtype.
        into: the parameter whose memory it is: the function changes that.
    """

    index: int
    shape: tuple[Size, ...]
    dtype: str
    into: int | None = None


@dataclass(frozen=True)
class Calling:
    """What has become of a function's parameters and results.

    It takes its parameters but for `implied`, then the memory of `given`, in order, and returns a
    tuple of the results that are neither given nor known.

    Attributes:
        results: how many results there were.
        given: the results that are written into memory of the caller's.
        known: shapes among the results that can be told before the call, by their index.
        symbols: the names in sizes, each with the parameter and the axis of it that show it.
        implied: parameters that are a size which the axis of another one shows: the parameter,
            the other one, the axis.
        kernel: the one kernel that the function calls, where that is all it does, and the places
            of its arguments among what the function takes.
        weights: shape and dtype (TVM's name) of each weight that it takes; none where one is no
            tensor, or has sizes that are symbols.
        line: what the function does, step by step, where its caller can do the same without it;
            see `pipeline.straight`.
        allocated: the bytes of what PyTorch's library allocates in a call, where sizes are known,
            without what is too large for the C library to keep once it is freed.
    """

    results: int
    given: tuple[Given, ...] = ()
    known: tuple[tuple[int, tuple[Size, ...]], ...] = ()
    symbols: tuple[tuple[str, int, int], ...] = ()
    implied: tuple[tuple[int, int, int], ...] = ()
    kernel: tuple[str, tuple[int, ...]] | None = None
    weights: tuple[tuple[tuple[int, ...], str], ...] = ()
    line: tuple[Any, ...] = ()
    allocated: int = 0

    def spelled(self) -> list[Any]:
        """All of it as JSON has it, for `read`."""
        return list(dataclasses.astuple(self))

    @classmethod
    def read(cls, said: list[Any]) -> Calling:
        """What `spelled` spelled."""
        results, given, *rest = _tuples(said)
        return cls(results, tuple(Given(*g) for g in given), *rest)


def _tuples(said: Any) -> Any:
    return tuple(_tuples(s) for s in said) if isinstance(said, (list, tuple)) else said
