"""What the arguments of an exported function look like."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Dim:
    """A size with what is known of it.

    Args:
        name: one name is one size in every function of an export, and in its weights.
        min: the least it can be.
        max: the most it can be; None for no bound.
        multiple_of: what divides it.

    Raises:
        ValueError: the name is no identifier, or no size can be all of it.
    """

    name: str
    min: int = 0
    max: int | None = None
    multiple_of: int = 1

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"the name of a size is an identifier, not {self.name!r}")
        if self.min < 0 or self.multiple_of < 1:
            raise ValueError(f"{self}: min is at least 0, multiple_of at least 1")
        least = -(-self.min // self.multiple_of) * self.multiple_of
        if self.max is not None and self.max < max(least, 1):
            raise ValueError(f"{self}: no size is all of that")


@dataclass(frozen=True)
class Tensor:
    """A tensor whose values are not known yet.

    Args:
        shape: sizes, each an int, a name, a `Dim`, text over names (``"2*n + 1"``), a `tirx.Var`
            or an expression over some. One name is one size everywhere; two `tirx.Var` are two
            sizes, even of one name.
        dtype: as TVM, NumPy or PyTorch names it.
    """

    shape: tuple[Any, ...] = field()
    dtype: Any = "float32"

    def __init__(self, shape: Any, dtype: Any = "float32") -> None:
        if isinstance(shape, (str, bytes)) or not hasattr(shape, "__iter__"):
            raise ValueError(f"a shape is a tuple of sizes, not {shape!r}")
        object.__setattr__(self, "shape", tuple(shape))
        name = getattr(dtype, "__name__", None) or getattr(dtype, "name", None) or str(dtype)
        object.__setattr__(self, "dtype", str(name).removeprefix("torch."))
