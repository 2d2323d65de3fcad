"""Inputs that become what is computed of them, element by element, in their own memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fx2relax
from fx2relax import stages
from fx2relax.calling import Given

OPTIONS = {"never_slower": False}


class _Results:
    """The results that programs, compiled meanwhile, write to memory of their caller's."""

    def __init__(self) -> None:
        self.given: list[Given] = []

    def note(self, stage: str, what: dict[str, Any]) -> None:
        if stage == "program":
            self.given += what["built"].calling.given

    def in_place(self) -> int:
        return sum(given.into is not None for given in self.given)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> _Results:
    torch._dynamo.reset()
    watch = _Results()
    monkeypatch.setattr(stages, "listeners", [*stages.listeners, watch])
    return watch


def _average(a: Tensor, b: Tensor) -> Tensor:
    a.mul_(0.9).add_(b, alpha=0.1)
    return b + 1


def _scaled(a: Tensor, b: Tensor) -> Tensor:
    a.sub_(a.mean()).div_(a.std())
    return b.exp()


def _replaced(a: Tensor, b: Tensor) -> Tensor:
    before = a.sum(0)
    a.copy_(b.cos())
    return before


def _of_others(a: Tensor, b: Tensor) -> Tensor:
    a.copy_(b.t() * 2)
    return b.sum()


def _both(a: Tensor, b: Tensor) -> Tensor:
    a.add_(b)
    b.mul_(a)
    return a - b


def _transposed(a: Tensor, b: Tensor) -> Tensor:
    a.copy_(a.t() + b)
    return a.sum()


def _turned(a: Tensor, b: Tensor) -> Tensor:
    a.copy_(a.flip(0) * 2)
    return a + b


def _shifted(a: Tensor, b: Tensor) -> Tensor:
    a.copy_(torch.cat([a[1:], b[:1]]))
    return a.amax(1)


def _of_rows(a: Tensor, b: Tensor) -> Tensor:
    a.copy_(a.softmax(1))
    return a @ b


def _running(a: Tensor, b: Tensor) -> Tensor:
    a.copy_(a.cumsum(0))
    return b.sin()


def _swapped(a: Tensor, b: Tensor) -> Tensor:
    first = a.clone()
    a.copy_(b)
    b.copy_(first)
    return first + b


def _read_later(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    new = a * b
    product = new @ a
    a.copy_(new)
    return product, new


ALONE = {_average: 1, _scaled: 1, _replaced: 1, _of_others: 1}
ANY = [_both, _transposed, _turned, _shifted, _of_rows, _running, _swapped, _read_later]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("size", [5, 33, 300])
@pytest.mark.parametrize("step", [*ALONE, *ANY])
@pytest.mark.parametrize("library", ["torch", "none"])
def test_elements(step: Callable[..., Any], size: int, library: str, found: _Results) -> None:
    torch.manual_seed(0)
    options = {**OPTIONS, "library": library}
    fast = torch.compile(step, backend="relax", options=options, dynamic=False)
    a, b = torch.randn(size, size), torch.rand(size, size)
    c, d = a.clone(), b.clone()
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(a, b), step(c, d), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close((a, b), (c, d), rtol=1e-4, atol=1e-4)
    if step in ALONE:
        assert found.in_place() == ALONE[step]


def _added_at(a: Tensor, b: Tensor) -> Tensor:
    a.index_add_(0, torch.tensor([1, 2, 1]), b[:3])
    return (a @ b).cos()


@pytest.mark.parametrize("step", [_average, _scaled, _added_at])
def test_check_compares_with_what_the_inputs_were(step: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        found = fx2relax.check(step, torch.randn(64, 64), torch.randn(64, 64))
    assert found.kernels > 0
    assert found.right, found


@pytest.mark.parametrize("library", ["torch", "none"])
def test_a_state_that_products_read(library: str, found: _Results) -> None:
    """A recurrent step: the new state is computed of a product with the old one."""
    torch.manual_seed(0)

    class Step(nn.Module):
        state: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(64, 64), nn.Linear(32, 64)
            self.register_buffer("state", torch.zeros(4, 64))

        def forward(self, x: Tensor) -> Tensor:
            self.state.copy_(torch.tanh(self.inner(self.state) + self.outer(x)))
            return self.state * 2

    eager, own = Step().eval(), Step().eval()
    own.load_state_dict(eager.state_dict())
    fast = torch.compile(own, backend="relax", options={**OPTIONS, "library": library})
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(4, 32)
            torch.testing.assert_close(fast(x), eager(x))
            torch.testing.assert_close(own.state, eager.state)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=torch.tensor(1e-2))


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), amsgrad=True)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1)


def _rmsprop(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=1e-2, centered=True)


@pytest.mark.sweep(6)
@pytest.mark.filterwarnings("ignore:.*script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("make", [_adam, _adamw, _sgd, _rmsprop])
def test_the_step_of_an_optimizer(make: Callable[..., Any], found: _Results) -> None:
    """Weights and moments are changed where they are."""
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(40, 70), nn.Linear(70, 9)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    eager, own = (make(net.parameters()) for net in nets)
    step = torch.compile(own.step, backend="relax", options=OPTIONS)
    addresses = [p.data_ptr() for p in nets[1].parameters()]
    for _ in range(4):
        x = torch.randn(8, 40)
        for net in nets:
            net.zero_grad()
            net(x).square().sum().backward()
        eager.step()
        step()
        torch.testing.assert_close(list(nets[1].parameters()), list(nets[0].parameters()))
    assert [p.data_ptr() for p in nets[1].parameters()] == addresses
    assert found.in_place() >= 8
