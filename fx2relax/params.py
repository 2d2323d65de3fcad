"""The parameters of a Relax function: their order, names and kinds, and `num_input`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

WEIGHT_KINDS = ("parameter", "buffer", "constant")


@dataclass
class InputSpec:
    """One placeholder of a captured graph.

    Attributes:
        name: the parameter's name in Relax; a weight's is its name in the `state_dict`.
        kind: ``"user"``, ``"parameter"``, ``"buffer"`` or ``"constant"``.
        val: the fake tensor, SymInt or Python constant that the graph was captured with.
        value: the real tensor of a weight, None for a user's input.
        mutated: whether the graph writes to it; it then stands left of `num_input`.
        written: which of the graph's outputs is written to it once the graph has run; it may lie
            in the input's memory, and be there at once.
        permutation: the order in which the axes lie in memory, when the tensor is dense and
            permuted (channels_last, a transpose): the Relax parameter then is the compact view.
        position: where it stands among the placeholders.
        at_start: whether it has to begin where its storage does: the graph names elements by
            their place in that.
        storage: how many elements of its storage the Relax parameter is, a flat tensor from which
            the graph takes the input itself: it names elements that are none of the input's.
    """

    name: str
    kind: str
    val: Any
    value: torch.Tensor | None = None
    mutated: bool = False
    permutation: tuple[int, ...] | None = None
    position: int = 0
    at_start: bool = False
    storage: int | None = None
    written: int | None = None
    relax_name: str = field(default="")

    @property
    def frozen(self) -> bool:
        """Whether this is a weight right of `num_input`."""
        return self.kind in WEIGHT_KINDS and not self.mutated

    @property
    def passed(self) -> bool:
        """Whether the Relax function takes it: Python constants are built in instead."""
        return isinstance(self.val, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))


def in_relax_order(inputs: Sequence[InputSpec]) -> tuple[list[InputSpec], int]:
    """User inputs, sizes and mutable buffers first, then frozen weights; and `num_input`."""
    passed = [spec for spec in inputs if spec.passed]
    left = [spec for spec in passed if not spec.frozen]
    right = [spec for spec in passed if spec.frozen]
    return left + right, len(left)
