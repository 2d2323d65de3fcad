"""What stands in for a program's weights, to see how long a call takes before any are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fx2relax.compat import from_torch
from fx2relax.dtypes import to_torch
from fx2relax.runtime.weights import room

# TVM aligns its own memory so, and PyTorch what it allocates.
_ALIGNED = 64
# Neither zero, of which the system keeps one page, nor so small that products are denormal.
_FILL = 0.01


class StandIns:
    """In the place of `Weights`: tensors of the right sizes, and of no meaning.

    They are read from the memory of the given weights, each from another one's while there are
    any: as much is read as from real ones, and no memory is taken. What is no floating point is
    zero, so that indices stay in range.

    Args:
        kinds: shape and dtype of each tensor.
    """

    def __init__(self, kinds: Sequence[tuple[tuple[int, ...], str]]) -> None:
        self._kinds = kinds
        self._ready: list[Any] | None = None

    def get(self, weights: Sequence[torch.Tensor]) -> list[Any]:
        """What stands right of `num_input` in a call."""
        if self._ready is None:
            self._ready = [from_torch(tensor) for tensor in _chosen(self._kinds, weights)]
        return self._ready


def _chosen(
    kinds: Sequence[tuple[tuple[int, ...], str]], weights: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """A tensor of each shape and dtype, out of the weights' memory where one is large enough."""
    usable = filter(_is_usable, weights)
    memory = [(room(weight) // weight.element_size(), weight) for weight in usable]
    memory.sort(key=lambda each: each[0])
    uses = [0] * len(memory)
    made: dict[tuple[tuple[int, ...], str], torch.Tensor] = {}
    found = []
    for shape, name in kinds:
        dtype = to_torch(name)
        count = torch.Size(shape).numel()
        fits = [
            index
            for index, (elements, weight) in enumerate(memory)
            if weight.dtype == dtype and elements >= count > 0
        ]
        if fits:
            chosen = min(fits, key=uses.__getitem__)
            uses[chosen] += 1
            weight = memory[chosen][1].detach()
            flat = weight.as_strided((count,), (1,), weight.storage_offset())
            found.append(flat.view(shape))
            continue
        if (shape, name) not in made:
            fill = _FILL if dtype.is_floating_point else 0
            made[shape, name] = torch.empty(shape, dtype=dtype).fill_(fill)
        found.append(made[shape, name])
    return found


def _is_usable(weight: torch.Tensor) -> bool:
    strided = weight.layout is torch.strided and not weight.is_quantized
    return strided and weight.dtype.is_floating_point and weight.data_ptr() % _ALIGNED == 0
