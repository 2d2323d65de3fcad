"""A short run of random programs; `sweep_programs.py` makes the long one."""

from __future__ import annotations

import pytest
from programs.check import check
from programs.generate import generate


@pytest.mark.parametrize("seed", range(12))
def test_as_eager(seed: int) -> None:
    program = generate(seed)
    verdict = check(program)
    assert not verdict.error or verdict.upstream, program.describe() + verdict.error


@pytest.mark.parametrize("seed", range(1000, 1004))
def test_at_three_sizes_as_eager(seed: int) -> None:
    program = generate(seed, dynamic=True)
    verdict = check(program, dynamic=True)
    assert not verdict.error or verdict.upstream, program.describe() + verdict.error


def test_a_seed_gives_one_program() -> None:
    assert generate(7).source() == generate(7).source() != generate(8).source()
