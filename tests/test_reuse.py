"""Kernels that write into the memory of what they read, and those that must not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from tvm import relax

from fx2relax.pipeline import building, reuse
from fx2relax.pipeline.flow import bindings, name_of

SIZES = [1, 3, 16, 17, 63, 64, 65, 100, 1000]


@pytest.fixture(autouse=True)
def _afresh() -> None:
    torch._dynamo.reset()  # all tests compile the same line


class Watch:
    """How much memory of their own the kernels of compiled functions have."""

    def __init__(self) -> None:
        self.before: list[int] = []
        self.after: list[int] = []

    def __call__(self, mod: Any) -> Any:
        made = reuse.reuse(mod)
        self.before += _allocated(mod)
        self.after += _allocated(made)
        return made

    @property
    def saved(self) -> int:
        """How many tensors lie in the memory of another."""
        return sum(self.before) - sum(self.after)


def _allocated(mod: Any) -> list[int]:
    functions = [f for _, f in mod.functions_items() if isinstance(f, relax.Function)]
    return [
        sum(name_of(b.value) == "relax.builtin.alloc_tensor" for b in bindings(f))
        for f in functions
    ]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    made = Watch()
    monkeypatch.setattr(building, "reuse", made)
    return made


def compiled(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    options = {"never_slower": False, "cache": False, **options}
    made: Callable[..., Any] = torch.compile(f, backend="relax", options=options)
    return made


def check(f: Callable[..., Any], arguments: Sequence[Tensor], **options: Any) -> None:
    """A function gives eager's results, twice, and leaves its arguments as they were."""
    kept = [a.clone() for a in arguments]
    wanted = f(*arguments)
    run = compiled(f, **options)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(run(*arguments), wanted, equal_nan=True)
            for now, before in zip(arguments, kept, strict=True):
                torch.testing.assert_close(now, before, rtol=0, atol=0, equal_nan=True)


def _summed(x: Tensor) -> Tensor:
    """Fused with nothing: its results are memory of the function's own."""
    return torch.cumsum(x, 0)


@pytest.mark.parametrize("size", SIZES)
def test_each_element_is_replaced_once(size: int, watch: Watch) -> None:
    """An element that were computed twice would be the function of a function."""
    check(lambda x: _summed(torch.exp2(-_summed(x)) + 1), [torch.rand(7, size)])
    assert watch.saved or size == 1


def test_with_threads(watch: Watch) -> None:
    x = torch.rand(11, 37, 97)
    check(lambda x: _summed(nn.functional.silu(_summed(x) * 3)), [x])
    assert watch.saved


@pytest.mark.parametrize("library", ["torch", "none"])
def test_after_convolutions(library: str, watch: Watch) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.Hardswish()]
    net = nn.Sequential(*layers, nn.Conv2d(8, 4, 1)).requires_grad_(False)
    x = torch.rand(2, 3, 19, 23)
    x[0, 0, 5, 5] = torch.nan
    check(net, [x], library=library)
    if library == "torch":
        assert watch.saved == 2


def test_after_products(watch: Watch) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(96, 512), nn.GELU(), nn.Linear(512, 96)).requires_grad_(False)
    check(net, [torch.rand(640, 96)])
    assert watch.saved == 1


def test_sizes_that_vary(watch: Watch) -> None:
    run = torch.compile(
        lambda x: _summed(torch.tanh(_summed(x)) - 1),
        backend="relax",
        dynamic=True,
        options={"never_slower": False, "cache": False},
    )
    for rows in (5, 8, 64, 1):
        x = torch.rand(rows, 33)
        torch.testing.assert_close(run(x), _summed(torch.tanh(_summed(x)) - 1))
    assert watch.saved


def _read_later(x: Tensor) -> Tensor:
    y = _summed(x)
    z = _summed(torch.tanh(y))
    return torch.cumsum(z, 1) * y


def _returned(x: Tensor) -> tuple[Tensor, Tensor]:
    y = _summed(x)
    return y, _summed(torch.tanh(y))


def _returned_as_view(x: Tensor) -> tuple[Tensor, Tensor]:
    y = _summed(x)
    return y.view(-1), _summed(torch.tanh(y))


def _viewed(x: Tensor) -> Tensor:
    y = _summed(x)
    flat = y.view(-1, 2)
    return _summed(torch.tanh(y)) + torch.cumsum(flat, 1).view(x.shape)


def _turned(x: Tensor) -> Tensor:
    y = _summed(x[:, : x.shape[0]])
    return _summed(y + y.t())


def _shifted(x: Tensor) -> Tensor:
    y = _summed(x)
    return _summed(y + y.roll(1, 0) + y.flip(1))


def _widened(x: Tensor) -> Tensor:
    y = _summed(x[:1])
    return _summed(y + x.sum(1, keepdim=True))


def _another_dtype(x: Tensor) -> Tensor:
    return torch.cumsum(_summed(x).to(torch.float64) * 3, 0)


@pytest.mark.parametrize(
    "f",
    [
        _read_later,
        _returned,
        _returned_as_view,
        _viewed,
        _turned,
        _shifted,
        _widened,
        _another_dtype,
        torch.exp,
        lambda x: (x.view(-1) * 2).cumsum(0),
    ],
)
def test_what_is_read_again_stays(f: Callable[..., Any]) -> None:
    check(f, [torch.rand(40, 64)])


def test_a_bound_argument_stays() -> None:
    """A weight, and what a call takes, are nobody's to write to."""
    scale = torch.rand(64)
    before = scale.clone()
    check(lambda x: torch.cumsum(scale.exp() * x, 0) + scale, [torch.rand(40, 64)])
    assert torch.equal(scale, before)


def test_gradients() -> None:
    x = torch.rand(40, 64, requires_grad=True)
    other = x.detach().clone().requires_grad_()

    def f(x: Tensor) -> Tensor:
        return _summed(nn.functional.silu(_summed(x))).mean()

    f(x).backward()
    compiled(f)(other).backward()
    torch.testing.assert_close(other.grad, x.grad)
