"""The first call of a program, beside eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_cases import graph_of

from fx2relax import first_call
from fx2relax.errors import BuildFailure


def _compared(
    function: Callable[..., Any], call: Callable[..., Any], strict: bool = False
) -> first_call.Compared:
    graph = graph_of(function, (4,), device="cpu")
    assert first_call.can_be_compared(graph)
    return first_call.Compared(call, graph, torch.device("cpu"), strict)


def test_a_program_that_is_right_runs_alone_from_then_on() -> None:
    calls: list[int] = []

    def run(arguments: Any) -> Any:
        calls.append(1)
        return (arguments[0] * 2 if len(calls) == 1 else arguments[0] * 3,)

    compared = _compared(lambda x: x + x, run)
    x = torch.arange(4.0)
    assert torch.equal(compared((x,))[0], 2 * x)
    assert torch.equal(compared((x,))[0], 3 * x)
    assert len(calls) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x + x + 0.1,
        lambda x: (x + x)[:3],
        lambda x: (x + x).double(),
        lambda x: torch.where(x == 1, torch.nan, x + x),
        lambda x: 1 // 0,
    ],
)
def test_a_program_that_is_wrong_is_not_run_again(
    wrong: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def run(arguments: Any) -> Any:
        calls.append(1)
        return (wrong(*arguments),)

    compared = _compared(lambda x: x + x, run)
    x = torch.arange(4.0)
    for _ in range(2):
        assert torch.equal(compared((x,))[0], 2 * x)
    assert len(calls) == 1
    (said,) = caplog.messages
    assert "is not as eager" in said
    assert "reproducer: " in said
    with pytest.raises(BuildFailure, match="is not as eager"):
        _compared(lambda x: x + x, run, strict=True)((x,))


def test_rounding_may_move_a_result_as_far_as_it_moves_eagers() -> None:
    def steep(x: torch.Tensor) -> torch.Tensor:
        return (x * 1e6).sin()

    x = torch.tensor([0.1, 0.3, 0.5, 0.7])
    moved = (steep(x) + torch.tensor([0.0, 0.05, 0.0, 0.0]),)
    assert torch.equal(_compared(steep, lambda a: moved, strict=True)((x,))[0], moved[0])
    with pytest.raises(BuildFailure, match="off by 3"):
        _compared(steep, lambda a: (steep(*a) + 3,), strict=True)((x,))
    with pytest.raises(BuildFailure, match="is off by 0"):
        _compared(lambda x: x.sin(), lambda a: (a[0].sin() + 0.05,), strict=True)((x,))


def test_whole_numbers_may_differ_where_values_are_nearly_equal() -> None:
    many = torch.arange(1000)
    one, some = many.clone(), many.clone()
    one[3] = 0
    some[:20] = 0
    assert first_call.difference([one], [many]) is None
    assert first_call.difference([some], [many]) == "result 0 has 2% of its elements unequal"


def test_draws_are_the_same_for_both() -> None:
    compared = _compared(lambda x: x + torch.rand(4), lambda a: (a[0] + torch.rand(4),))
    x = torch.zeros(4)
    torch.manual_seed(3)
    got = [compared((x,))[0], torch.rand(2)]
    torch.manual_seed(3)
    assert torch.equal(got[0], torch.rand(4))
    assert torch.equal(got[1], torch.rand(2))


def test_what_eager_raises_is_raised() -> None:
    def fail(arguments: Any) -> Any:
        raise RuntimeError("of the program")

    compared = _compared(lambda x: torch.linalg.cholesky(x.reshape(2, 2)), fail)
    with pytest.raises(torch.linalg.LinAlgError):
        compared((-torch.ones(4),))


def test_what_leaves_a_trace_is_not_compared() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.add_.Tensor, (x, 1)))
    assert not first_call.can_be_compared(torch.fx.GraphModule({}, graph))
