"""Calls of a GPU's libraries that the libraries refuse are made apart, and not tried again."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.testing._internal.common_utils import DeterministicGuard

from fx2relax.runtime import guarded


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The calls of libraries, which all refuse, for tensors that count as those of a GPU."""
    made: list[tuple[str, dict[str, Any]]] = []
    aten = torch.ops.aten

    def refusing(name: str) -> Callable[..., Any]:
        names = [a.name for a in getattr(aten, name).default._schema.arguments]

        def call(*args: Any, **kwargs: Any) -> Any:
            made.append((name, {**dict(zip(names, args, strict=False)), **kwargs}))
            raise RuntimeError("GET was unable to find an engine to execute this computation")

        return call

    libraries = ("_addmm_activation", "cudnn_convolution_relu", "cudnn_convolution_add_relu")
    own = {name: refusing(name) for name in libraries}
    calls = SimpleNamespace(convolution=aten.convolution.default, **own)
    monkeypatch.setattr(guarded, "_calls", calls)
    monkeypatch.setattr(guarded, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(guarded, "_refused", set())
    return made


def test_a_refused_product_is_tried_once(called: list[Any]) -> None:
    bias, a, b = torch.randn(4), torch.randn(3, 5), torch.randn(5, 4)
    call = torch.ops.fx2relax.addmm_activation
    for _ in range(3):
        torch.testing.assert_close(call(bias, a, b), torch.addmm(bias, a, b).relu())
        expected = F.gelu(torch.addmm(bias, a, b), approximate="tanh")
        torch.testing.assert_close(call(bias, a, b, True), expected)
    assert [(name, given["use_gelu"]) for name, given in called] == [
        ("_addmm_activation", False),
        ("_addmm_activation", True),
    ]
    call(bias, a[:2], b)
    assert len(called) == 3, "other sizes are tried"
    given = called[0][1]
    assert given["self"] is bias
    assert given["mat2"] is b


@pytest.mark.parametrize("summed", [False, True])
def test_a_refused_convolution_is_tried_once(called: list[Any], summed: bool) -> None:
    x, weight, bias = torch.randn(2, 4, 9, 9), torch.randn(6, 2, 3, 3), torch.randn(6)
    window = [2, 1], [0, 1], [1, 2], 2
    plain = F.conv2d(x, weight, bias, *window)
    z = torch.randn_like(plain) if summed else None
    expected = (plain + z if summed else plain).relu()
    for _ in range(3):
        result = torch.ops.fx2relax.convolution_relu(x, weight, bias, z, *window)
        torch.testing.assert_close(result, expected)
    ((name, given),) = called
    assert name == ("cudnn_convolution_add_relu" if summed else "cudnn_convolution_relu")
    settings = [given[n] for n in ("stride", "padding", "dilation", "groups")]
    assert settings == [[2, 1], [0, 1], [1, 2], 2]
    assert given["bias"] is bias
    assert given["weight"] is weight
    assert (given.get("z"), given.get("alpha")) == ((z, 1) if summed else (None, None))


@pytest.mark.parametrize("setting", ["enabled", "deterministic", "algorithms"])
def test_settings_are_those_of_each_call(called: list[Any], setting: str) -> None:
    arguments = torch.randn(1, 2, 4, 4), torch.randn(2, 2, 3, 3), torch.randn(2), None
    window = [1, 1], [0, 0], [1, 1], 1
    cudnn = torch.backends.cudnn
    patch = {
        "enabled": cudnn.flags(enabled=False),
        "deterministic": cudnn.flags(deterministic=True),
        "algorithms": DeterministicGuard(True),
    }[setting]
    with patch:
        torch.ops.fx2relax.convolution_relu(*arguments, *window)
    assert called == []
    torch.ops.fx2relax.convolution_relu(*arguments, *window)
    assert len(called) == 1


def test_what_is_no_refusal_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "_refused", set())
    x, tried = torch.ones(2), []

    def full() -> Any:
        tried.append("full")
        raise torch.OutOfMemoryError

    def wrong() -> Any:
        raise RuntimeError("sizes do not match")

    with pytest.raises(torch.OutOfMemoryError):
        guarded._guarded(("a",), (x,), full, lambda: tried.append("apart"))
    with pytest.raises(RuntimeError, match="do not match"):
        guarded._guarded(("b",), (x,), wrong, wrong)
    assert tried == ["full"]
    assert guarded._refused == set()


def test_what_is_remembered_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "_refused", set())
    monkeypatch.setattr(guarded, "_MOST", 3)

    def refused() -> Any:
        raise RuntimeError("no engine")

    for size in range(1, 9):
        guarded._guarded(("a",), (torch.ones(size),), refused, lambda: None)
        assert len(guarded._refused) <= 3
