"""A short run of random programs; `sweep_programs.py` makes the long one."""

from __future__ import annotations

import pytest
import torch
from programs.check import check
from programs.generate import generate
from programs.program import SIZES, Input, Program


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


@pytest.mark.parametrize("cast", ["double()", "to(torch.float64)", "type(torch.float64)"])
def test_a_cast_copies_in_float64_too(cast: str) -> None:
    """What is written into its result stays out of its operand, or the two programs are not one."""
    lines = [f"v0 = x0.{cast}", "v0.neg_()", "v2 = v0.double()", "v2.add_(1)"]
    program = Program(0, [Input(("a", "b"), torch.float32)], lines, ["x0", "v0"])
    for wide in (False, True):
        (x,) = program.arguments(SIZES[0], wide=wide)
        given = x.clone()
        same, negated = program.function(wide=wide)(x)
        assert torch.equal(same, given)
        assert torch.equal(negated, 1 - given.double())
