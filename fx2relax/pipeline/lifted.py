"""What was lifted out of the functions of a module, and what was not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tvm import DataType

from ..compat import TensorType, shape_values


@dataclass(frozen=True)
class Lifted:
    """A result that a transform of weights makes once.

    Attributes:
        name: its name in the new list of weights.
        what: the computation, readable.
        sources: the names of the weights that it is made of.
        bytes: its size; None if that is a symbol's.
        functions: those that computed it.
    """

    name: str
    what: str
    sources: tuple[str, ...]
    bytes: int | None
    functions: tuple[str, ...]

    def __str__(self) -> str:
        size = "bytes not known" if self.bytes is None else f"{self.bytes} bytes"
        return f"{self.name} = {self.what}  ({size}; {', '.join(self.functions)})"


@dataclass(frozen=True)
class Kept:
    """Work on weights alone that a function still does in each call.

    Attributes:
        name: the variable's.
        what: the computation, readable.
        why: why it stays.
        functions: those that compute it.
    """

    name: str
    what: str
    why: str
    functions: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} = {self.what}  ({', '.join(self.functions)}): {self.why}"


@dataclass(frozen=True)
class Shared:
    """A module whose work on weights is lifted.

    Attributes:
        mod: the module.
        lifted: what its transforms compute, in the order of their results.
        kept: what its functions still compute from weights alone, and why.
        transforms: by function, the name of the transform whose results it takes as weights; a
            function that is missing takes the weights as they are.
    """

    mod: Any = field(repr=False)
    lifted: tuple[Lifted, ...]
    kept: tuple[Kept, ...]
    transforms: Mapping[str, str]

    def weights(self, function: str) -> list[str]:
        """The names of the weights that a function takes now, in order."""
        func = self.mod[function]
        return [str(p.name) for p in func.params[int(func.attrs["num_input"]) :]]

    def __str__(self) -> str:
        lines = ["lifted:", *(f"  {x}" for x in self.lifted or ("nothing",))]
        return "\n".join([*lines, "kept:", *(f"  {x}" for x in self.kept or ("nothing",))])


def size_of(ty: Any) -> Any:
    """The bytes of a tensor: an int, or an expression of symbols; infinite if they are unknown."""
    sizes = shape_values(ty) if isinstance(ty, TensorType) else None
    if sizes is None:
        return float("inf")
    kind = DataType(str(ty.dtype))
    size: Any = max(kind.bits * kind.lanes // 8, 1)
    for number in sizes:
        size = size * number
    return size
