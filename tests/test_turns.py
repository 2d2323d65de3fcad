"""Transpositions that follow one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipeline_cases import module, run
from tvm.script import relax as R

from fx2relax.pipeline import lower
from fx2relax.testing import assert_matches_eager


def twice(first: list[int], second: list[int]) -> Callable[..., Any]:
    return lambda b, x: R.exp(b.emit(R.permute_dims(b.emit(R.permute_dims(x, first)), second)))


@pytest.mark.parametrize(
    ("first", "second", "left"),
    [([1, 0, 2], [1, 0, 2], 0), ([2, 0, 1], [1, 2, 0], 0), ([1, 2, 0], [0, 2, 1], 1)],
)
def test_two_are_one_or_none(first: list[int], second: list[int], left: int) -> None:
    mod = module(twice(first, second), (2, 3, 4))
    assert lower(mod).script().count("def fused_transpose") == left
    x = torch.randn(2, 3, 4)
    got = torch.from_dlpack(run(mod, x))
    torch.testing.assert_close(got, x.permute(first).permute(second).exp())


def test_nothing_is_left_of_a_parameter() -> None:
    mod = module(lambda b, x: R.permute_dims(b.emit(R.permute_dims(x))), (3, 4))
    x = torch.randn(3, 4)
    assert torch.equal(torch.from_dlpack(run(mod, x)), x)


def test_the_product_behind_two_is_called_as_it_lies() -> None:
    """The backward pass of a linear layer: weights and gradients are not copied."""

    def body(b: Any, grad: Any, w: Any) -> Any:
        return R.matmul(grad, b.emit(R.permute_dims(b.emit(R.permute_dims(w)))))

    text = lower(module(body, (20, 8), (8, 9))).script()
    assert "matmul_nn" in text
    assert "transpose" not in text
    layer = torch.nn.Linear(8, 9)
    assert_matches_eager(layer, torch.randn(20, 8), grad=True)
