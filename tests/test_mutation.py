"""Writes in place: into inputs, through views, through `out=`, and into buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fx2relax.testing import assert_matches_eager


def _ordered(*shape: int) -> torch.Tensor:
    count = 1
    for size in shape:
        count *= size
    return torch.arange(float(count)).view(shape)


def _through_views(x: torch.Tensor) -> torch.Tensor:
    x[0] = 7
    x[:, 1:] *= 2
    x.t()[2].add_(1)
    x[1::2, ::5].zero_()
    x.diagonal().fill_(-1)
    x[1:].unsqueeze(0).sub_(x[:1])
    return x + 1


def _and_returned(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.add_(1)
    return y, x[1:], y.t(), x * 2


def _by_indices(x: torch.Tensor) -> torch.Tensor:
    i = torch.tensor([0, 2])
    x[i] = 1.5
    x[i, i] += 2
    x.index_add_(0, i, x[:2].clone())
    x.masked_fill_(x > 3, 0)
    x.scatter_(1, i[None], 9.0)
    x.copy_(x.flip(0))
    return x.sum()


def _of_a_copy(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.clone()
    v = y[:, 1:]
    v.mul_(3)
    y[0, 0] = -1
    z = torch.zeros(4, 6)
    z[1:3, :4] = x[:2, :4]
    z += y
    return y, v, z


def _by_shape(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.clone().t_()
    y.unsqueeze_(0).squeeze_(0).transpose_(0, 1).mul_(2)
    return y, x.clamp_(2, 9).sqrt_()


CASES: list[Callable[[torch.Tensor], Any]] = [
    _through_views,
    _and_returned,
    _by_indices,
    _of_a_copy,
    _by_shape,
]


@pytest.mark.parametrize("case", CASES)
def test_writes(case: Callable[[torch.Tensor], Any]) -> None:
    assert_matches_eager(case, _ordered(4, 6))
    assert_matches_eager(case, _ordered(8, 6)[::2])
    assert_matches_eager(case, _ordered(6, 4).t())


@pytest.mark.parametrize("case", [_through_views, _and_returned, _of_a_copy])
def test_writes_with_symbolic_sizes(case: Callable[[torch.Tensor], Any]) -> None:
    assert_matches_eager(case, _ordered(4, 6), dynamic=True)


def test_gradients_through_writes() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[1:] = w[1:] * 3
        y[:, 0] *= w[:, 1]
        y.t()[2].exp_()
        return y.cumsum(0).mul_(2)

    assert_matches_eager(function, _ordered(4, 6) / 9, _ordered(4, 6) / 5, grad=True)


def test_two_inputs_that_overlap() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2

    whole = _ordered(24)
    assert_matches_eager(function, whole, whole[6:18].view(3, 4))
    assert_matches_eager(function, whole[:12], whole[12:])
    assert_matches_eager(lambda x, y: (x.add_(1), y.mul_(2)), whole, whole)


def _windows(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    v = torch.as_strided(x, (2, 2), (1, 1))
    v[0] = v[0] * 2
    v[1].add_(1)
    return v, x + 1


def _rows(x: torch.Tensor) -> torch.Tensor:
    v = (x * 1).expand(2, 4)
    v[0].mul_(2)
    torch.add(v[0], 1, out=v[1])
    nn.functional.relu(v[1, 1:], inplace=True)
    v[1, ::2] -= 5
    return v


def _moving(x: torch.Tensor) -> torch.Tensor:
    v = (x * 1).unfold(0, 2, 1)
    torch.ops.aten.mul_.Tensor(v[1], 4)
    return v


@pytest.mark.parametrize("function", [_windows, _rows, _moving])
def test_elements_that_share_memory(function: Callable[[torch.Tensor], Any]) -> None:
    assert_matches_eager(function, _ordered(4), torch_calls=True)
    with pytest.raises(RuntimeError, match="share memory"):
        torch.compile(function, backend="relax", options={"on_unsupported": "raise"})(_ordered(4))


def test_a_write_beside_elements_that_share_memory() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 1
        v = y.expand(2, 4)
        w = v.contiguous()
        y.mul_(2)
        w.add_(v)
        return v, w

    assert_matches_eager(function, _ordered(4))


def test_as_many_rows_as_a_mask_chooses_share_no_memory() -> None:
    def function(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x[:, mask, 1:] += 2
        return x

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert_matches_eager(function, _ordered(3, 4, 3), _ordered(4) > 1)


def test_shared_elements_written_all_at_once() -> None:
    refused = lambda x: (x * 1).expand(2, 4).mul_(2)  # noqa: E731
    torch._dynamo.reset()
    for call in (refused, torch.compile(refused, backend="relax")):
        with pytest.raises(RuntimeError, match="more than one element"):
            call(_ordered(4))


def test_results_given() -> None:
    def function(
        x: torch.Tensor, out: torch.Tensor, rows: torch.Tensor, square: torch.Tensor
    ) -> torch.Tensor:
        torch.add(x, 1, out=out)
        torch.sum(x, 0, out=rows[0])
        torch.mm(x, x.t(), out=square)
        values = torch.empty(4)
        indices = torch.empty(4, dtype=torch.int64)
        torch.max(x, 1, out=(values, indices))
        return values + indices + out[:, 0]

    assert_matches_eager(
        function, _ordered(4, 6), torch.zeros(4, 6), torch.zeros(2, 6), torch.ones(4, 4)
    )


def test_buffers() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(6))
            self.register_buffer("calls", torch.tensor(0))
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.seen[1:] += x.mean(0)[1:]
            return self.norm(x) * self.calls + self.seen

    torch.manual_seed(0)
    eager, compiled = Counter(), Counter()
    compiled.load_state_dict(eager.state_dict())
    fast = torch.compile(compiled, backend="relax", fullgraph=True)
    for step in range(3):
        x = _ordered(4, 6) * (step + 1)
        torch.testing.assert_close(fast(x), eager(x))
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[name], value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x[0] = 1
        x[:, ::2].copy_(x[:, 1::2])
        x.logical_not_() if x.dtype is torch.bool else x.add_(x)
        return x.flip(0)

    assert_matches_eager(function, _ordered(4, 6).to(dtype))


def test_empty_and_0d() -> None:
    assert_matches_eager(
        lambda x, n: (x.add_(1), n.mul_(2), n + 1), torch.ones(0, 3), torch.tensor(2.0)
    )


def test_a_tensor_returned_twice_is_one_tensor() -> None:
    def written(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.clone()
        return y.add_(1), y

    first, second = torch.compile(written, backend="relax")(torch.randn(3))
    assert first is second

    def windows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.clone()
        return y.as_strided_((2, 2), (1, 1)), y

    first, second = torch.compile(windows, backend="relax")(torch.randn(3))
    assert first is second


@pytest.mark.parametrize("draw", ["geometric_", "log_normal_", "cauchy_", "exponential_"])
def test_draws_in_place_are_those_of_eager(draw: str) -> None:
    arguments = (0.3,) if draw == "geometric_" else ()
    assert_matches_eager(
        lambda x: getattr(x.clone(), draw)(*arguments), torch.ones(50), seed=3, torch_calls=True
    )


def test_a_result_given_without_elements_is_resized() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(0)
        torch.sin(x, out=out)
        return out

    assert_matches_eager(fn, _ordered(6), fullgraph=False)


def test_an_input_that_the_gradient_needs_is_written_to():
    def fn(counts, shift, y):
        far = torch.hypot(counts + y, y)
        near = y * (shift + 1).T
        counts.mul_(2)
        shift.copy_(shift + 1)
        return far * 1, near * near

    shift, y = torch.rand(4, 3), torch.rand(3, 4)
    assert_matches_eager(fn, torch.tensor([3]), shift, y.requires_grad_(), grad=True)
