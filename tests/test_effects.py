"""Operators that must happen, in order: their errors are eager's."""

from __future__ import annotations

import pytest
import torch

from fx2relax.testing import assert_matches_eager


def test_checked_factorisations() -> None:
    def solve(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inverse = torch.linalg.inv(a)
        return inverse @ a, torch.linalg.solve(a, b), torch.linalg.matrix_power(a, -2)

    a = torch.randn(3, 3, generator=torch.Generator().manual_seed(0)) + 4 * torch.eye(3)
    assert_matches_eager(solve, a, torch.ones(3), grad=True, torch_calls=True, tol=1e-4)


def test_a_failed_check_raises_what_eager_raises() -> None:
    compiled = torch.compile(torch.linalg.inv, backend="relax")
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        compiled(torch.zeros(3, 3))
    assert torch.equal(compiled(torch.eye(3)), torch.eye(3))
