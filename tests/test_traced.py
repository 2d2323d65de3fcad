"""Functions that look at values, which Dynamo leaves to eager by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fx2relax.testing import assert_matches_eager

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def numbers_in_graphs() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


NAN = torch.tensor([1.0, float("nan")])


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: (torch.equal(x, y), torch.equal(x, y + 1), x * 2),
        lambda x, y: (x.equal(y), y.equal(x[1:]), torch.equal(x[:0], y[:0])),
        lambda x, y: (torch.equal(x, y.double()), torch.equal(x.int(), y)),
        lambda x, y: (torch.allclose(x, y + 1e-9), torch.allclose(x, y + 0.1, atol=0.2)),
        lambda x, y: (x.allclose(y + 0.1), x.allclose(y[:1], 0.0, 9.0), x.allclose(other=y)),
        lambda x, y: (torch.allclose(NAN, NAN), torch.allclose(NAN, NAN, equal_nan=True)),
    ],
)
def test_one_truth_of_two_tensors(fn: Callable[..., Any]) -> None:
    x = torch.linspace(-2, 2, 12).view(3, 4)
    assert_matches_eager(fn, x, x.clone())


def test_a_branch_on_it_breaks_the_graph() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return x + 1 if torch.equal(x, y) else y.sin()

    x = torch.arange(4.0)
    for y in (x.clone(), x * 2):
        assert_matches_eager(fn, x, y, fullgraph=False)
        with torch._dynamo.config.patch(capture_scalar_outputs=False):
            assert_matches_eager(fn, x, y, fullgraph=False)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_gaussian_loss(full: bool, reduction: str) -> None:
    def fn(x: Tensor, y: Tensor, var: Any) -> Tensor:
        return F.gaussian_nll_loss(x, y, var, full=full, reduction=reduction)

    torch.manual_seed(0)
    x, y, var = torch.randn(3, 4), torch.randn(3, 4), torch.rand(3, 4)
    for given in (var, var[:, :1], var[:, 0], 1.5):
        assert_matches_eager(fn, x, y, given, grad=True)


def test_gaussian_loss_of_a_negative_variance() -> None:
    compiled = torch.compile(F.gaussian_nll_loss, backend="relax", fullgraph=True)
    x, var = torch.randn(3).requires_grad_(), torch.tensor([1.0, 2.0, 3.0])
    for given in (x, x.detach()):
        torch._dynamo.reset()
        assert torch.allclose(compiled(given, var, var), F.gaussian_nll_loss(given, var, var))
        with pytest.raises(ValueError, match="negative"):
            compiled(given, var, var - 2)
    with pytest.raises(ValueError, match="incorrect size"):
        torch.compile(F.gaussian_nll_loss, backend="relax")(x, var, var[:2])


def test_other_backends_have_their_own_ways() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda x, y: torch.equal(x, y), backend="eager")
    assert compiled(torch.ones(3), torch.ones(3))
    assert torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gaussian_loss_of_other_dtypes(dtype: torch.dtype) -> None:
    x = torch.linspace(0.5, 2, 12).view(3, 4).to(dtype)
    assert_matches_eager(F.gaussian_nll_loss, x, x.flip(0), x.t().contiguous().t())


def test_chunks_of_what_was_made_twice() -> None:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2, allow_retain_graph=False)

    def fn(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.linear_cross_entropy(x, weight, target, reduction="none", options=options)

    torch.manual_seed(0)
    assert_matches_eager(fn, torch.randn(8, 3), torch.randn(4, 3), torch.arange(8) % 4, grad=True)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_unknown_alignments(as_tensors: bool, reduction: str) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(7, 3, 5), torch.tensor([[1, 2, 2, 0], [4, 3, 3, 3], [1, 1, 1, 1]])
    lengths: Any = [7, 5, 6], [3, 0, 4]
    if as_tensors:
        lengths = [torch.tensor(v) for v in lengths]

    def fn(x: Tensor, targets: Tensor, steps: Any, counts: Any) -> Tensor:
        x = x.log_softmax(2)
        return F.ctc_loss(x, targets, steps, counts, reduction=reduction, zero_infinity=True)

    assert_matches_eager(fn, logits, targets, *lengths)
    assert_matches_eager(fn, logits.double(), targets.int(), *lengths)
    row = torch.tensor([1, 2, 2, 1, 1, 1, 1])
    assert_matches_eager(fn, logits, row, *lengths, grad=True, torch_calls=True)


def test_alignments_that_there_are_none_of() -> None:
    x, targets = torch.randn(2, 4).log_softmax(1), torch.tensor([1, 1, 2])
    for zero in (False, True):
        for steps, count in ((2, 3), (0, 3)):
            assert_matches_eager(
                lambda x, t, n, m, zero=zero: F.ctc_loss(x, t, n, m, 3, "sum", zero),
                x,
                targets,
                torch.tensor(steps),
                torch.tensor(count),
                grad=zero,
                torch_calls=True,
            )
    compiled = torch.compile(F.ctc_loss, backend="relax", fullgraph=True)
    with pytest.raises(RuntimeError, match="input_lengths"):
        compiled(x, targets, torch.tensor(3), torch.tensor(3))
    with pytest.raises(RuntimeError, match="targets"):
        compiled(x, targets, torch.tensor(2), torch.tensor(4))


def test_as_many_parts_as_a_tensor_says() -> None:
    def fn(x: Tensor, count: Tensor) -> list[Tensor]:
        return [part * 2 for part in torch.tensor_split(x, count, 1)]

    compiled = torch.compile(fn, backend="relax", fullgraph=True)
    x = torch.arange(21.0).view(3, 7)
    for count in (3, 2, 4, 3):
        parts = compiled(x, torch.tensor(count)), fn(x, torch.tensor(count))
        assert len(parts[0]) == count
        assert all(torch.equal(a, e) for a, e in zip(*parts, strict=True))
    assert_matches_eager(fn, x, torch.tensor(2))
    assert_matches_eager(fn, x, torch.tensor([2, 3]))
    assert_matches_eager(lambda x, n: fn(x, n + 1), x, torch.tensor(2), fullgraph=False)
