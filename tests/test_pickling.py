"""Compiled models are copied, pickled and saved as those of PyTorch's own backend are."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("fresh")


def _saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": _saved,
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"options": {"library": "none"}, "dynamic": True},
]


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval()


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def _outcome(work: Callable[[], Any]) -> Any:
    """What comes of some work: the type of the result, or of the exception."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Inductor imports is deprecated in parts
            made = work()
    except Exception as error:
        return "raised", type(error)
    return "made", type(made), sorted(getattr(made, "state_dict", dict)())


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_copy_computes_the_same(how: str, options: dict[str, Any]) -> None:
    net, x = _net(), torch.randn(4, 6)
    fast = torch.compile(net, backend="relax", **options)
    with torch.no_grad():
        expected = net(x)
        torch.testing.assert_close(fast(x), expected)
        other = COPIES[how](fast)
        assert type(other) is type(fast)
        assert other.state_dict().keys() == fast.state_dict().keys()
        torch.testing.assert_close(other(x), expected)
        if how == "copy.copy":
            return
        next(iter(other.parameters())).zero_()  # it has weights of its own
        torch.testing.assert_close(fast(x), expected)
        assert not torch.equal(other(x), expected)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("what", [_net, lambda: scaled], ids=["module", "function"])
def test_what_comes_of_a_copy_is_what_comes_under_inductor(how: str, what: Any) -> None:
    ours, inductor = (
        _outcome(lambda name=name: COPIES[how](torch.compile(what(), backend=name)))
        for name in ("relax", "inductor")
    )
    assert ours == inductor


def test_a_model_that_is_compiled_in_place() -> None:
    net, x = _net(), torch.randn(4, 6)
    expected = net(x)
    net.compile(backend="relax")
    for copied in (net, *(make(net) for make in COPIES.values())):
        with torch.no_grad():
            torch.testing.assert_close(copied(x), expected)
    assert list(net.state_dict()) == list(_net().state_dict())


def test_weights_are_saved_and_loaded_under_their_names() -> None:
    one, other = (torch.compile(_net(), backend="relax") for _ in range(2))
    x = torch.randn(4, 6)
    with torch.no_grad():
        assert not torch.equal(one(x), other(x))
        other.load_state_dict(_saved(one.state_dict()))
        torch.testing.assert_close(one(x), other(x))
    assert list(one.state_dict()) == [f"_orig_mod.{name}" for name in _net().state_dict()]


def test_a_copy_is_trained_apart() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    fast, x = torch.compile(net, backend="relax"), torch.randn(4, 6)
    fast(x).sum().backward()
    other = copy.deepcopy(fast)
    grads = [p.grad.clone() for p in fast.parameters()]
    other(x).sum().backward()
    for parameter, twin, grad in zip(fast.parameters(), other.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
        torch.testing.assert_close(twin.grad, grad)  # a copy of a parameter has none
