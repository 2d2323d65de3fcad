"""`as_strided` where it names elements that are none of its operand's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fx2relax.testing import assert_matches_eager

Tensor = torch.Tensor


def _parts() -> Sequence[Tensor]:
    whole = torch.arange(24.0)
    return whole[2:6], whole[3:15].view(3, 4)[:, ::2], whole[20:], whole[:4], torch.ones(2, 2)


READS: dict[str, Callable[..., Any]] = {
    "before": lambda x, *_: x.as_strided((4,), (1,), 0) * 2,
    "from itself": lambda x, *_: torch.as_strided_copy(x, (3, 2), (1, 2)) + x[1],
    "gaps": lambda _, x, *__: x.as_strided((4,), (3,), 1) * x.sum(),
    "two parts": lambda x, _, y, *__: x.as_strided((3,), (5,)) + y.as_strided((3,), (2,), 1),
    "beyond the end": lambda *all: all[3].as_strided((8,), (1,), 0).sin(),
    "a part of a part": lambda x, *_: x[1:].as_strided((5,), (1,), 1) * 2,
    "a view of a view": lambda x, *_: x.as_strided((8,), (1,), 0).as_strided((3,), (2,)) * x[0],
    "of what is computed": lambda x, *_: (x * 2)[2:].as_strided((3,), (1,), 1) * 2,
    "of a transpose": lambda _, x, *__: (x + 1).t()[1:].as_strided((2,), (3,), 1) * 2,
    "returned": lambda x, *_: (x.as_strided((5,), (1,), 1), x + 1),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("grad", [False, True])
def test_reads(name: str, grad: bool) -> None:
    assert_matches_eager(READS[name], *_parts(), grad=grad)


def test_other_dtypes() -> None:
    for dtype in (torch.bfloat16, torch.int8, torch.bool):
        x = (torch.arange(24) % 3).to(dtype)[5:15]
        assert_matches_eager(lambda x: x.as_strided((2, 3), (1, 4), 7).clone(), x)


def test_scatter() -> None:
    def fn(_: Tensor, x: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.as_strided_scatter(x, rest[-1], (2, 2), (1, 3), 1)
        return y, y.as_strided((7,), (1,), 1) * 2

    assert_matches_eager(fn, *_parts())


def test_a_parameter_that_is_a_part() -> None:
    class Part(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.arange(8.0)[2:6])

        def forward(self, x: Tensor) -> Tensor:
            return self.weight.as_strided((3,), (1,), 0) * x + self.weight[1:]

    module = Part()
    compiled = torch.compile(module, backend="relax", options={"on_unsupported": "raise"})
    x = torch.ones(3)
    assert torch.equal(compiled(x), module(x))
    with torch.no_grad():
        module.weight.mul_(2)
    assert torch.equal(compiled(x), module(x))
    compiled(x).sum().backward()
    actual, module.weight.grad = module.weight.grad, None
    module(x).sum().backward()
    assert actual is not None
    assert module.weight.grad is not None
    assert torch.equal(actual, module.weight.grad)


def test_another_place_in_another_storage() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.as_strided((6,), (1,), 0) * 2

    compiled = torch.compile(fn, backend="relax")
    for x in (
        torch.arange(8.0)[2:6],
        torch.arange(9.0)[2:6],
        torch.arange(9.0)[3:7],
        torch.arange(6.0)[2:],
    ):
        assert torch.equal(compiled(x), fn(x))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: x.as_strided((4,), (1,), 0).add_(1) * 2,
        lambda x, y: (x.add_(1), x.as_strided((9,), (1,), 0) * 2)[1],
        lambda x, y: (y.add_(1), torch.as_strided_copy(x, (9,), (1,), 0))[1],
        lambda x, y: x.as_strided((4,), (1,), 0)[0].fill_(5) * 1,
    ],
)
def test_writes(fn: Callable[..., Any]) -> None:
    whole = torch.arange(24.0)
    assert_matches_eager(fn, whole[2:6], whole[6:12], torch_calls=True)
    with pytest.raises(RuntimeError, match="beside an input"):
        torch.compile(fn, backend="relax", options={"on_unsupported": "raise"})(
            whole[2:6], whole[6:12]
        )


def test_writes_within_an_input() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        x.as_strided((2,), (2,), 1).mul_(3)
        return x * 2, x.as_strided((2, 2), (1, 2))

    assert_matches_eager(fn, torch.arange(8.0)[:4])
