"""Random numbers: PyTorch's generators, so that a seed gives what it gives in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx2relax.testing import assert_matches_eager

P = torch.tensor([[0.1, 0.4, 0.5], [0.3, 0.3, 0.4]])

DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "uniform": lambda p: (torch.rand(3, 2), torch.rand_like(p), p.clone().uniform_(-1, 2)),
    "normal": lambda p: (torch.randn(4), torch.randn_like(p), p.clone().normal_(1, 3)),
    "normal of tensors": lambda p: (torch.normal(p, 0.5), torch.normal(2.0, p), torch.normal(p, p)),
    "integers": lambda p: (torch.randint(0, 9, (5,)), torch.randint_like(p, 4), torch.randperm(7)),
    "coins": lambda p: (torch.bernoulli(p), p.bernoulli(0.3), p.clone().bernoulli_(p)),
    "classes": lambda p: (
        torch.multinomial(p, 2),
        torch.multinomial(p, 5, replacement=True),
        F.gumbel_softmax(p, hard=True),
    ),
    "heavy tails": lambda p: (p.clone().exponential_(2), p.clone().cauchy_(), p.geometric_(0.4)),
    "counts": lambda p: (torch.poisson(p * 9), torch.binomial(p * 0 + 6, p)),
    "dropout": lambda p: (
        F.dropout(p, 0.4),
        F.alpha_dropout(p, 0.3),
        torch.feature_dropout(p[None], 0.5, True),
    ),
    "channels": lambda p: (F.dropout1d(p[None], 0.5), F.dropout2d(p[None, None], 0.5)),
    "slopes": lambda p: (F.rrelu(p - 0.4, training=True),),
    "gamma": lambda p: (torch._standard_gamma(p + 1), torch.distributions.Gamma(p, p + 1).sample()),
    "one after another": lambda p: (torch.rand(2), p.sum() + torch.rand(2), torch.randn(2) * 2),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_seed_gives_what_it_gives_in_eager(name: str) -> None:
    draw = DRAWS[name]
    assert_matches_eager(lambda p: draw(p.clone()), P, seed=3, torch_calls=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    def fn(p: Tensor) -> tuple[Tensor, ...]:
        return torch.rand_like(p), torch.randn_like(p), F.dropout(p, 0.3), torch.bernoulli(p)

    assert_matches_eager(fn, P.to(dtype), seed=5, torch_calls=True)


LAYOUTS = {
    "transposed": lambda: torch.rand(9, 4).t(),
    "permuted": lambda: torch.rand(6, 4, 5).permute(0, 2, 1),
    "channels_last": lambda: torch.rand(2, 3, 5, 4).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.rand(5, 1, 6).expand(5, 4, 6).transpose(0, 2),
    "strided": lambda: torch.rand(5, 12)[:, ::2].t(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_draws_fill_memory_in_its_order(layout: str) -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return (
            *(torch.rand_like(x), torch.randn_like(x), torch.randint_like(x, 9)),
            *(x.clone().uniform_(), x.clone().normal_(), x.clone().exponential_()),
            *(torch.bernoulli(x), x.bernoulli(0.3), x.clone().bernoulli_(x)),
            *(F.dropout(x, 0.5), *torch.native_dropout(x, 0.5, True), x.clone().geometric_(0.3)),
            *(torch.poisson(x), torch.binomial(x.round(), x), torch._standard_gamma(x + 1)),
            *(torch.normal(x, x), torch.normal(x, 2.0), torch.normal(2.0, x)),
            *(torch.multinomial(x.flatten(1), 2), F.alpha_dropout(x, 0.5, training=True)),
        )

    assert_matches_eager(fn, LAYOUTS[layout](), seed=6, torch_calls=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_dropped_lies_as_the_input_does(dynamic: bool) -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return F.dropout(x, 0.5), F.dropout(y.transpose(0, 1), 0.5).sin(), torch.rand_like(y)

    x = LAYOUTS["channels_last"]()
    assert_matches_eager(fn, x, seed=6, torch_calls=True, grad=True, dynamic=dynamic)


def test_gradients_of_what_is_dropped() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        noisy = x + torch.randn_like(x) * x
        return F.dropout(noisy, 0.5).sin(), F.rrelu(x, training=True)

    assert_matches_eager(fn, torch.randn(6, 5), seed=9, torch_calls=True, grad=True)


def test_attention_with_dropout() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)

    qkv = [torch.randn(2, 2, 5, 4) for _ in range(3)]
    assert_matches_eager(fn, *qkv, seed=2, torch_calls=True)


def test_sizes_of_draws_may_be_symbolic() -> None:
    assert_matches_eager(
        lambda x: (torch.rand(x.shape[0], 2), F.dropout(x, 0.5)),
        torch.randn(6, 5),
        seed=1,
        torch_calls=True,
        dynamic=True,
    )


def test_modules_in_training_and_in_evaluation() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.RReLU(), nn.Linear(8, 3))
    x = torch.randn(4, 5)
    for mode in (True, False):
        assert_matches_eager(model.train(mode), x, seed=4, torch_calls=True, grad=True)


def test_the_generators_state_moves_on_as_in_eager() -> None:
    def fn() -> Tensor:
        return torch.rand(3) + torch.randn(3)

    def both(fn: Callable[[], Tensor]) -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(8)
        return [fn(), torch.rand(2), fn()], torch.get_rng_state()

    compiled, eager = both(torch.compile(fn, backend="relax")), both(fn)
    for a, e in zip(compiled[0], eager[0], strict=True):
        torch.testing.assert_close(a, e)
    assert torch.equal(compiled[1], eager[1])
