"""Sizes that depend on the data: selections, counts, bounds and indices out of tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fx2relax.testing import assert_matches_eager

pytestmark = pytest.mark.sweep

NAN = float("nan")
X = torch.tensor([[1.0, 0.0, -2.0], [NAN, -0.0, 3.0]])


@pytest.fixture(autouse=True)
def _captured() -> Iterator[None]:
    flags = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(flags):
        yield


def _positions(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.nonzero(), torch.argwhere(x > 0), *x.nonzero(as_tuple=True)


@pytest.mark.parametrize("x", [X, X.int(), X > 0, X.bfloat16(), X[:0], X.T, X[:, ::2]], ids=str)
def test_positions(x: torch.Tensor) -> None:
    assert_matches_eager(_positions, x)


def test_positions_in_a_number() -> None:
    assert_matches_eager(lambda x: x.nonzero(), torch.tensor(2.0))
    assert_matches_eager(lambda x: x.nonzero(), torch.tensor(0))


def test_positions_with_symbolic_sizes() -> None:
    assert_matches_eager(_positions, X, dynamic=True)


def test_so_many_positions() -> None:
    both = lambda x: (  # noqa: E731
        torch.nonzero_static(x, size=2),
        torch.nonzero_static(x, size=6, fill_value=7),
    )
    assert_matches_eager(both, X)
    assert_matches_eager(both, X.long())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_elements_where_a_mask_is_true(dtype: torch.dtype) -> None:
    x = torch.arange(12).view(3, 4).to(dtype)
    mask = torch.arange(12).view(3, 4) % 3 == 0

    def function(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.masked_select(mask), x[mask], x[mask[:, 0]], x[:, mask.any(0)], x[~mask] * 2

    assert_matches_eager(function, x, mask, grad=dtype is torch.float32)
    assert_matches_eager(lambda x, m: x.masked_select(m[0]), x.T, mask.T[:, :1])
    assert_matches_eager(function, x[:0], mask[:0])


def test_what_follows_a_selection() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chosen = x[x > 0]
        return chosen.sum(), chosen.softmax(0), chosen[None] * chosen[:, None], chosen.sort()[0]

    assert_matches_eager(function, torch.randn(9), grad=True)
    assert_matches_eager(lambda x: x[x > 5].sum(), torch.randn(9))


def test_repeats_out_of_a_tensor() -> None:
    def function(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.repeat_interleave(n, 0), x.repeat_interleave(n, 0, output_size=6), n.sum() * 2

    assert_matches_eager(function, torch.randn(3, 4), torch.tensor([2, 0, 4]), grad=True)
    compiled = torch.compile(torch.Tensor.repeat_interleave, backend="relax")
    with pytest.raises(RuntimeError, match="negative"):
        compiled(torch.randn(3), torch.tensor([2, -1, 4]))


@pytest.mark.parametrize("index", [2, -1, 0])
def test_bounds_and_indices_out_of_a_tensor(index: int) -> None:
    def function(x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        at = i.item()
        return (x * 2)[at], (x * 2)[at:], x[:at] + 1, x.T[at], x[at:], torch.narrow(x, 0, i, 1)

    assert_matches_eager(function, torch.randn(4, 4), torch.tensor(index))


@pytest.mark.parametrize("dim", [0, 1])
def test_split_where_a_tensor_says(dim: int) -> None:
    split = torch.tensor([1, 3, -1])
    assert_matches_eager(lambda x, i: x.tensor_split(i, dim), torch.randn(5, 5, 5), split)


def test_sizes_out_of_a_tensor() -> None:
    def function(n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        size = n.item()
        return torch.arange(size), torch.ones(size, 2) * size, torch.zeros(2, size).sum(0)

    assert_matches_eager(function, torch.tensor(5))


def _distinct(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (
        x.unique(),
        *x.unique(return_inverse=True, return_counts=True),
        *x.unique_consecutive(return_inverse=True, return_counts=True),
        x.unique_consecutive(),
    )


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.uint8, torch.bool, torch.float32, torch.bfloat16]
)
def test_distinct_elements(dtype: torch.dtype) -> None:
    x = torch.tensor([[3, 1, 1, 0], [2, 2, 3, 7]]).to(dtype)
    assert_matches_eager(_distinct, x)
    assert_matches_eager(_distinct, x.T)
    assert_matches_eager(_distinct, x[:, :0])


def test_distinct_elements_with_nan_and_signed_zeros() -> None:
    assert_matches_eager(_distinct, torch.tensor([3.0, NAN, 1.0, 1.0, NAN, NAN, -0.0, 0.0]))
    assert_matches_eager(_distinct, torch.tensor(2.0))
    assert_matches_eager(_distinct, torch.tensor([3, 1, 3]), dynamic=True)


def test_a_truth_that_is_returned_is_a_bool():
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert_matches_eager(lambda x: (x.any().item(), x.sum().item()), torch.tensor([0, 1, 2]))
