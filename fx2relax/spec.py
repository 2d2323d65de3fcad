"""What a tensor is to be, without one: its sizes and its dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tensor:
    """A tensor's shape and dtype.

    Attributes:
        shape: ints, names, or `tirx.Var` and expressions of them. One name is one size wherever
            it stands; two `tirx.Var` are two sizes.
        dtype: TVM's name of the dtype.
    """

    shape: tuple[Any, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
