"""How PyTorch lays four-bit weights out on CPU, which depends on the machine."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _disable_current_modes

_ROWS = 128


@dataclass(frozen=True)
class Layout:
    """The order of a packed weight's rows in memory.

    Rows lie in blocks; of a block, all rows of one column lie side by side, two to a byte. Where
    `halves`, a byte of a whole block holds one row of its first half and, in its high bits, one of
    its second half. In all other blocks it holds two neighbours.
    """

    block: int
    halves: bool

    def blocks(self, rows: int) -> list[tuple[int, int, bool]]:
        """First row, number of rows and whether they lie in halves, of each block."""
        found = []
        for first in range(0, rows, self.block):
            count = min(self.block, rows - first)
            found.append((first, count, self.halves and count == self.block))
        return found


@functools.cache
def layout() -> Layout | None:
    """The layout of this process; None if it is none that is known here."""
    try:
        with _disable_current_modes(), torch.no_grad():
            packed = _packed_numbers()
    except RuntimeError:
        return None
    known = [Layout(block, halves) for halves in (True, False) for block in (64, 32, 16)]
    for found in known:
        if packed == _expected(found):
            return found
    return None


def _packed_numbers() -> list[int]:
    """The number of the row that lies in each half of a byte, for two columns of weights."""
    rows = torch.arange(_ROWS, dtype=torch.int32)[:, None].expand(_ROWS, 2)
    numbers = torch.zeros(_ROWS * 2, dtype=torch.int64)
    for shift in (0, 4):
        part = (rows >> shift) & 15
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(part.contiguous(), 1)
        packed = packed.flatten().to(torch.int64)
        numbers += torch.stack([packed & 15, packed >> 4], 1).flatten() << shift
    return numbers.tolist()


def _expected(found: Layout) -> list[int]:
    numbers = []
    for first, count, halves in found.blocks(_ROWS):
        half = count // 2
        block = [(i, i + half) if halves else (2 * i, 2 * i + 1) for i in range(half)]
        numbers += [first + row for pair in block for row in pair] * 2
    return numbers
