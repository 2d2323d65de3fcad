"""`torch.cond`, compiled and imported."""

from __future__ import annotations

import pytest
import torch
from networks.check import run_without_torch
from torch import nn
from tvm import relax

import fx2relax
from fx2relax.testing import assert_matches_eager


def choose(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cond(
        x.sum() > 0, lambda a, b: (a + b, a.relu()), lambda a, b: (a * b, b - 1), (x, y)
    )


class Nested(nn.Module):
    """Choices within a choice, and weights in the branches."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(v: torch.Tensor) -> torch.Tensor:
            return torch.cond(v.max() > 1, lambda t: self.up(t), lambda t: t.sin(), (v,))

        return torch.cond(x.mean() > 0, inner, lambda t: self.down(t) * 2, (x,)) + 1


@pytest.mark.sweep(6)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dynamic", [None, True])
def test_both_branches(sign: int, dynamic: bool | None) -> None:
    x, y = sign * torch.rand(3, 4), torch.randn(3, 4)
    assert_matches_eager(choose, x, y, dynamic=dynamic)
    assert_matches_eager(choose, x, y, dynamic=dynamic, grad=True)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("shift", [-2.0, 0.1, 3.0])
def test_a_choice_within_a_choice(shift: float) -> None:
    torch.manual_seed(0)
    module = Nested()
    x = torch.rand(3, 4) + shift
    with torch.no_grad():
        assert_matches_eager(module, x)
    assert_matches_eager(module, x, grad=True)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_branch_reads_a_size_that_is_known(sign: int) -> None:
    """The width becomes a number as the product is traced; the branch takes it as a size."""
    layer = nn.Linear(16, 16)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda v: layer(v).sin(), lambda v: layer(v).cos(), (x,))

    fx2relax.reset_stats()
    assert_matches_eager(function, sign * torch.rand(4, 16), dynamic=True)
    assert fx2relax.stats()["nodes_fallback"] == 0


def test_draws_in_a_branch_follow_the_seed() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda t: t + torch.rand_like(t), lambda t: t * 2, (x,))

    assert_matches_eager(noisy, torch.rand(5), seed=1, torch_calls=True)


@pytest.mark.parametrize("shift", [-2.0, 0.1, 3.0])
def test_imported_it_is_a_relax_if(shift: float) -> None:
    torch.manual_seed(0)
    module = Nested().eval()
    x = torch.rand(3, 4) + shift
    with torch.no_grad():
        mod = fx2relax.from_fx(torch.export.export(module, (x,)))
        expected = module(x)
    ifs: list[relax.If] = []
    for function in mod.functions.values():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(
                function, lambda e: ifs.append(e) if isinstance(e, relax.If) else None
            )
    assert len(ifs) == 2
    mod, params = relax.frontend.detach_params(mod)
    (got,) = run_without_torch(mod, params, [x])
    torch.testing.assert_close(got, expected)
