"""A seeded slice of the sweep over PyTorch's `op_db`; `sweep_opinfo.py` runs the whole."""

from __future__ import annotations

import random

import pytest
from opinfo.check import run
from opinfo.rows import Row, rows

_SLICE = random.Random(2026).sample(list(rows()), 14)


@pytest.mark.parametrize("row", _SLICE, ids=str)
def test_as_eager(row: Row) -> None:
    assert run(row, 3).failures == []
