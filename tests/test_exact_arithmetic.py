"""Fused arithmetic: nothing is simplified that floats or wrapping integers do not allow."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fx2relax.testing import assert_matches_eager

INF, NAN = float("inf"), float("nan")
FLOATS = torch.tensor([NAN, INF, 1.0, -INF, -0.0, 0.0, 3e38, 0.1, 1e8])

ON_FLOATS: list[Callable[[Tensor], Tensor]] = [
    lambda x: (x - x).exp(),
    lambda x: torch.nn.functional.mse_loss(x, x),
    lambda x: torch.where(x - x == 0, x, 7.0),
    lambda x: x[0].std(0, correction=0),
    lambda x: (x + 12582912.0) - 12582912.0,
    lambda x: x - (x + 1),
    lambda x: x.exp() - x,
    lambda x: x * 4 - x.abs() * 3,
    lambda x: x * 0.1 - 0.1 * x.abs(),
    lambda x: x + x - x,
    lambda x: (x * 0).sin() + 0,
    lambda x: 1 / (x + 0.0),
    lambda x: 1 / (x * 1.0),
    lambda x: (0 / x) * 2,
    lambda x: 0 // x,
    lambda x: torch.div(0, x, rounding_mode="trunc") + 1,
    lambda x: 1 / (0.0 - x),
    lambda x: torch.where(x > 0, x, x) - x,
    lambda x: ~((x < 1) | (x >= 1)),
    lambda x: (x == x) & (x.abs() >= 0),
    lambda x: torch.zeros_like(x) * x + torch.ones_like(x) * 0 / x,
    lambda x: (-x) + x,
    lambda x: x % 0,
    lambda x: 0 % x,
    lambda x: -0.0 // x,
    lambda x: torch.add(x, x, alpha=0),
    lambda x: torch.addcmul(x, x, x, value=0),
    lambda x: torch.addcdiv(x, x, x, value=0),
    lambda x: torch.lerp(x, x + 1, 0.0) + torch.lerp(x, x + 1, 1.0),
    lambda x: torch.nn.functional.leaky_relu(x, 0.0),
    lambda x: torch.nn.functional.elu(x, 0.0),
    lambda x: x**0 + x**1,
]
ON_INTEGERS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x + 1 > x,
    lambda x: (x * 2) // 2,
    lambda x: torch.minimum(x, x + 1) + torch.maximum(x, x - 1),
    lambda x: (x * 3) % 3,
    lambda x: (x + 7) // 7,
    lambda x: x - 5 < 0,
    lambda x: (x - 5).clamp(min=0),
    lambda x: x * x >= 0,
    lambda x: (x * 4) >> 2,
    lambda x: torch.div(x * 2, 2, rounding_mode="trunc"),
    lambda x: (x.abs() + 1) // 3,
    lambda x: (x.clamp(min=0) + 1) // 3,
    lambda x: (x * 1000).to(torch.int64),
    lambda x: (x[:, None] + 1 > x).sum(1),
    lambda x: (x + 1).max() + (x + 1).argmax(),
    lambda x: (x * 2).cumsum(0),
    lambda x: x.sum(dtype=x.dtype) * 3 > x,
]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_floats(dtype: torch.dtype) -> None:
    x = FLOATS.to(dtype)
    for fn in ON_FLOATS:
        assert_matches_eager(fn, x, tol=0)
    assert_matches_eager(lambda x: [fn(x) for fn in ON_FLOATS], x)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8], ids=str
)
def test_integers(dtype: torch.dtype) -> None:
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    x = torch.tensor([most, least, 5, 0, 7, most - 1, least + 1] * 5, dtype=dtype)
    for fn in ON_INTEGERS:
        assert_matches_eager(fn, x)
    assert_matches_eager(lambda x: [fn(x) for fn in ON_INTEGERS], x, dynamic=True)


def test_a_generator_of_numbers() -> None:
    def fn(seed: Tensor) -> Tensor:
        return (seed * 6364136223846793005 + 1442695040888963407) * 1000 % 1000

    assert_matches_eager(fn, torch.arange(12345, 12400))


def test_what_is_made_of_indices_starts_over() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        n, i = x.shape[1], torch.arange(x.shape[0])
        small = i.to(torch.int8)
        return (i * 6364136223846793005) // n, i * 6364136223846793005 % n, small // n, small % n

    for dynamic in (False, True):
        assert_matches_eager(fn, torch.ones(300, 7), dynamic=dynamic)


def test_powers_and_their_logarithms_are_whole_numbers() -> None:
    n = torch.arange(-20.0, 20.0)
    assert_matches_eager(lambda n: (n.exp2() + 0, (n.exp2() * 1).log2() + 0), n, tol=0)
    assert_matches_eager(lambda x: x.log10() + 0, torch.tensor(10.0) ** n[20:], tol=0)


def test_a_choice_between_elements_in_half_precision() -> None:
    """A branch that binds a variable stays where its condition guards it."""

    def fn(x: Tensor) -> Tensor:
        y = x.to(torch.bfloat16)
        y[-2].remainder_(7)
        return y

    assert_matches_eager(fn, torch.arange(9.0).view(3, 3))
    assert_matches_eager(fn, torch.arange(9.0).view(3, 3), dynamic=True)


def test_indices_that_start_over_at_a_power_of_two() -> None:
    """LLVM's vectorizer takes 16 elements in a row for those at ``i & 3``."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x = torch.randn(6, 3, 4)
        assert_matches_eager(lambda x: torch.kron(x, x).transpose(1, 2).contiguous(), x)
        assert_matches_eager(lambda x: x.repeat(2, 3, 4).transpose(1, 2).contiguous(), x)
        assert_matches_eager(lambda x: x.flatten()[torch.arange(40) % 8] * 2, x)
    finally:
        torch.set_num_threads(threads)


def test_remainders_keep_not_a_number():
    """Also where LLVM sees that the dividend is finite and the divisor not zero."""
    x = torch.tensor([NAN, 3.0, -2.0, 0.0, 7.0, INF, -9.0])

    def fn(x):
        near, by = x.abs().clamp(max=5), x.abs().clamp(min=1, max=3)
        known = x % math.nan, x // math.nan, torch.fmod(x, math.nan), math.nan % x
        return (
            torch.fmod(torch.sin(x), 3).isnan(),
            torch.fmod(near, by).isnan(),
            (near % by).isnan(),
            *known,
        )

    assert_matches_eager(fn, x)
    whole = torch.tensor([3, -2, 1])
    assert_matches_eager(lambda x: (x % math.nan, x.float() // math.nan), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tanh_near_zero(dtype):
    x = torch.tensor([-0.0, 0.0, 1e-12, -1e-8, 1e-5, -0.3, 0.7, -20.0], dtype=dtype)
    actual = torch.compile(torch.tanh, backend="relax")(x)
    assert torch.equal(actual.signbit(), x.signbit())
    exact = torch.tanh(x.double())
    assert ((actual.double() - exact).abs() <= 4 * torch.finfo(dtype).eps * exact.abs()).all()


def test_the_sign_of_a_zero_that_wins():
    x = torch.tensor([-0.0, 0.0])
    assert_matches_eager(lambda x: (1 / torch.fmax(x, -x), 1 / torch.fmin(x, -x)), x)


def test_powers_of_two_beyond_the_range():
    x = torch.tensor([0.0, 1e-30, 1e30, -3.0, INF, 1.0, NAN])
    powers = torch.tensor([2000, 150, -150, 5, -2000, -140, 2**40])
    for dtype in (torch.float32, torch.float64, torch.float16):
        assert_matches_eager(torch.ldexp, x.to(dtype), powers)


def test_dropped_infinities():
    x = torch.tensor([INF, -INF, 1.0])
    assert_matches_eager(lambda x: torch.nn.functional.dropout(x, 1.0), x)


def test_results_of_their_own():
    image = torch.rand(1, 1, 2, 2)
    assert_matches_eager(lambda x: torch.nn.functional.unfold(x, (1, 2)), image)
    assert_matches_eager(lambda x: torch.nn.functional.channel_shuffle(x, 1), image)
