"""`check` tells rounding from what is wrong, and names values that no kernel makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fx2relax
from fx2relax import registry
from fx2relax.compat import op
from fx2relax.converters.common import const, emit, relax
from fx2relax.differences import is_rounding

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("fresh")


def _large(*shape: int) -> torch.Tensor:
    return 1e6 + torch.randn(*shape)


RIGHT: dict[str, tuple[Callable[..., Any], Callable[[], torch.Tensor]]] = {
    "terms that cancel out": (lambda x: x.sum(-1) - 1e6 * x.shape[-1], lambda: _large(8, 500)),
    "a sum of large numbers": (lambda x: (x * 1e6 - 1e6).sum(), lambda: torch.rand(300, 300)),
    "a sum of both signs": (lambda x: x.sum(), lambda: torch.randn(1000, 300) * 1e5),
    "a centred product": (lambda x: (x - x.mean()) @ x.T, lambda: _large(40, 70)),
    "softmax": (lambda x: x.softmax(-1).log(), lambda: 30 * torch.randn(20, 90)),
    "layer norm": (lambda x: F.layer_norm(x, (64,)), lambda: _large(20, 64)),
    "variance": (lambda x: x.var(-1).sqrt(), lambda: _large(20, 64)),
    "angles far out": (lambda x: (x * 1e4).sin() - x.cos(), lambda: torch.randn(40, 70) * 50),
    "a remainder": (lambda x: (x * 1e3) % 0.7, lambda: torch.randn(40, 70)),
    "the border of a comparison": (lambda x: x.mean(-1) > x.sum(-1) / 64, lambda: _large(99, 64)),
    "a logarithm near nothing": (lambda x: (x.exp().log() - x).abs().log(), lambda: torch.rand(99)),
}


@pytest.mark.sweep
@pytest.mark.parametrize("library", ["torch", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", RIGHT)
def test_rounding_is_right(name: str, dtype: torch.dtype, library: str) -> None:
    function, make = RIGHT[name]
    x = make() if dtype is torch.float32 else (make() * 1e-3).to(dtype)
    found = fx2relax.check(function, x, options={"library": library})
    assert found.right, str(found)
    assert found.kernels


def _off(function: Callable[[Any], Any], by: float) -> Callable[..., Any]:
    return lambda x, *rest: op.multiply(function(x), const(1 + by, x))


WRONG: dict[str, tuple[Callable[..., Any], Any, Callable[..., Any]]] = {
    "small results of large inputs": (
        lambda x: torch.erfc(x) * 1e-3,
        aten.erfc.default,
        _off(lambda x: op.subtract(const(1.0, x), op.erf(x)), 2e-1),
    ),
    "between large numbers": (
        lambda x: (x * 1e4).tanh() + (x * 1e-3).sigmoid(),
        aten.sigmoid.default,
        _off(op.sigmoid, 2e-1),
    ),
    "after a sum": (
        lambda x: torch.sin(x.sum(-1) * 1e-2),
        aten.sin.default,
        _off(op.sin, 2e-1),
    ),
    "a comparison": (lambda x: x.exp() < 1.0, aten.lt.Scalar, lambda x, y: op.less_equal(x, x)),
}


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("library", ["torch", "none"])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_no_rounding(name: str, library: str, dtype: torch.dtype) -> None:
    function, target, wrong = WRONG[name]
    options = {"library": library, "call_function_map": {target: wrong}}
    found = fx2relax.check(function, (4 * torch.randn(50, 60)).to(dtype), options=options)
    assert str(target) in [node.op for node in _nodes(found)], str(found)


class Leaps(torch.nn.Module):
    """Results that leap where their inputs hardly move, all over the tensor."""

    def __init__(self, leap: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.leap = leap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() + self.leap(x.tanh() * 3)


def _swapped(condition: Any, one: Any, other: Any) -> Any:
    return op.where(condition, other, one)


def _smallest(x: Any, k: int, *rest: Any) -> Any:
    both = op.topk(op.astype(x, "float32"), k=k, ret_type="both", largest=False, dtype="int64")
    return op.astype(both[0], x.ty.dtype), both[1]


LEAPS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Any, Callable[..., Any]]] = {
    "two sides": (lambda x: x.where(x > 0.1, x * x * 0.1), aten.where.self, _swapped),
    "indices": (lambda x: x + x.topk(3, -1)[1].to(x.dtype).sum(-1, True), aten.topk, _smallest),
    "steps": (torch.round, aten.round, lambda x: op.floor(x)),
}


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LEAPS)
def test_what_leaps_everywhere_is_no_rounding(name: str, dtype: torch.dtype) -> None:
    leap, target, wrong = LEAPS[name]
    target = getattr(target, "default", target)
    x = torch.randn(18, 32).to(dtype)
    right = fx2relax.check(Leaps(leap), x, options={"library": "none"})
    assert right.right, str(right)
    options = {"library": "none", "call_function_map": {target: wrong}}
    found = fx2relax.check(Leaps(leap), x, options=options)
    assert str(target) in [node.op for node in _nodes(found)], str(found)


def _nodes(found: fx2relax.Checked) -> list[Any]:
    return [node for wrong in found.wrong for node in wrong.nodes]


def test_a_thousandth_of_small_results() -> None:
    wrong = {aten.erfc.default: _off(lambda x: op.subtract(const(1.0, x), op.erf(x)), 1e-3)}
    options = {"call_function_map": wrong, "library": "none"}
    found = fx2relax.check(lambda x: torch.erfc(x) * 1e-6, 4 * torch.randn(50, 60), options=options)
    assert "aten.erfc.default" in [node.op for node in _nodes(found)]


def test_half_precision_is_judged_by_its_own_rounding() -> None:
    x = (8 * torch.randn(50, 60)).to(torch.bfloat16)
    wrong = {aten.erfc.default: _off(lambda x: op.subtract(const(1.0, x), op.erf(x)), 0.1)}
    found = fx2relax.check(torch.erfc, x, options={"call_function_map": wrong})
    assert [node.op for node in _nodes(found)] == ["aten.erfc.default"] * len(found.wrong) != []


def test_numbers_that_are_no_fractions() -> None:
    """A place is right where it is that of a value which is as large but for rounding."""
    x = torch.tensor([[1.0, 1.0 + 1e-7, 0.0], [3.0, 1.0, 2.0]])

    def run(inputs: Any, wide: bool) -> torch.Tensor:
        return inputs["x"].argmax(-1)

    expected = torch.tensor([1, 0])
    assert is_rounding(torch.tensor([0, 0]), expected, {"x": x}, run)
    assert not is_rounding(torch.tensor([2, 0]), expected, {"x": x}, run)
    assert not is_rounding(torch.tensor([0, 2]), expected, {"x": x}, run)


class Bytes(torch.nn.Module):
    """A product of bytes that are rounded as they come: one of them may be its neighbour."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(96, 128) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        whole = (x / scale).round().clamp(-128, 127).to(torch.int8)
        weight = (self.weight * 100).round().clamp(-128, 127).to(torch.int8)
        product = torch._int_mm(whole, weight.T)
        return x.sum(-1, keepdim=True) + product * scale / 100


@pytest.mark.parametrize("library", ["torch", "none"])
def test_bytes_are_rounded_to_either_side(library: str) -> None:
    found = fx2relax.check(Bytes(), torch.randn(64, 128), options={"library": library})
    assert found.right, str(found)


def test_numbers_that_are_not_finite() -> None:
    x = torch.tensor([1.0, 4.0])

    def run(inputs: Any, wide: bool) -> torch.Tensor:
        return (inputs["x"] - 1.0).log()

    expected = run({"x": x}, False)  # minus infinity, and a number
    near = torch.tensor([-16.0, expected[1]])
    assert is_rounding(near, expected, {"x": x}, run)
    assert not is_rounding(torch.tensor([float("inf"), expected[1]]), expected, {"x": x}, run)
    assert not is_rounding(torch.tensor([-16.0, float("nan")]), expected, {"x": x}, run)


class Names(torch.nn.Module):
    """A kernel before, a value in question, a view of it, kernels after."""

    def __init__(self, question: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.question = question
        self.weight = torch.nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = torch.tanh(x @ self.weight)
        asked = self.question(before)
        return torch.sin(asked.reshape(-1, 8) * 2).softmax(-1) @ self.weight[:8] + x.sum()


def _ones(x: Any, *rest: Any) -> Any:
    return relax.const(np.ones([int(size) for size in x.ty.shape], "float32"))


QUIET: dict[str, tuple[Callable[[torch.Tensor], Any], Any, Callable[..., Any]]] = {
    "as it was given": (torch.neg, aten.neg.default, lambda x: x),
    "a constant": (lambda x: x.neg(), aten.neg.default, _ones),
    "another argument": (lambda x: torch.sub(x.neg(), x), aten.sub.Tensor, lambda x, y, **k: y),
    "of a view": (lambda x: x.neg().T.exp(), aten.neg.default, lambda x: x),
}


@pytest.mark.sweep
@pytest.mark.parametrize("library", ["torch", "none"])
@pytest.mark.parametrize("name", QUIET)
def test_a_value_that_no_kernel_makes_is_named(name: str, library: str, tmp_path: Any) -> None:
    question, target, wrong = QUIET[name]
    options = {"library": library, "call_function_map": {target: wrong}}
    found = fx2relax.check(Names(question), torch.randn(16, 16), options=options)
    assert {node.op for node in found.wrong[0].nodes} == {str(target)}, str(found)
    assert len(found.wrong) == 1, str(found)
    assert "that no single kernel makes" in str(found)
    (script,) = found.reproduce(tmp_path)
    assert str(target) in script.read_text(encoding="utf-8")


def test_what_is_done_once_on_weights_is_named() -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.exp()

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x, self.weight).relu()

    options = {"call_function_map": {aten.exp.default: _off(op.exp, 1e-2)}}
    found = fx2relax.check(Net(), torch.randn(4, 16), options=options)
    assert [node.op for wrong in found.wrong for node in wrong.nodes] == ["aten.exp.default"]


VIEWS: dict[str, tuple[Any, Callable[[torch.Tensor], torch.Tensor]]] = {
    "select": (aten.select.int, lambda w: w[0]),
    "unsqueeze": (aten.unsqueeze.default, lambda w: w.unsqueeze(0).sum(0)[0]),
    "slice": (aten.slice.Tensor, lambda w: w[:, 3:5].sum(1)),
}


@pytest.mark.sweep
@pytest.mark.parametrize("library", ["torch", "none"])
@pytest.mark.parametrize("name", VIEWS)
def test_a_wrong_view_of_a_weight_is_named(name: str, library: str) -> None:
    """And not the kernel that reads it: a view alone is what the converter makes of it."""
    target, view = VIEWS[name]

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.mv(x, view(self.weight)).sigmoid()

    shipped = registry.registered()[target].function
    wrong = {target: lambda *given, **named: _scaled(shipped(*given, **named), 1.003)}
    options = {"call_function_map": wrong, "library": library}
    found = fx2relax.check(Net(), torch.randn(4, 16), options=options)
    assert {node.op for each in found.wrong for node in each.nodes} == {str(target)}, str(found)


def _scaled(value: Any, factor: float) -> Any:
    value = emit(value)
    return op.multiply(value, const(factor, value))


HALF: dict[str, tuple[Any, Callable[[torch.Tensor], torch.Tensor]]] = {
    "erfc": (aten.erfc.default, torch.erfc),
    "amax": (aten.amax.default, lambda x: x - x.amax(-1, keepdim=True)),
    "softmax": (aten._softmax.default, lambda x: x.softmax(-1)),
    "group_norm": (aten.native_group_norm.default, lambda x: F.group_norm(x, 4)),
    "cumsum": (aten.cumsum.default, lambda x: x.cumsum(-1)),
    "exp": (aten.exp.default, lambda x: (-x * x).exp() * 3 + 1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HALF)
def test_some_roundings_of_half_precision_are_wrong(name: str, dtype: torch.dtype) -> None:
    """Eight roundings are more than fused kernels leave, and none are found where all is right."""
    target, function = HALF[name]
    shipped = registry.registered()[target].function
    factor = 1 + 8 * torch.finfo(dtype).eps

    def wrong(*given: Any, **named: Any) -> Any:
        made = shipped(*given, **named)
        several = target is aten.native_group_norm.default
        return (_scaled(made[0], factor), *made[1:]) if several else _scaled(made, factor)

    x = torch.randn(20, 64).to(dtype)
    options = {"library": "none"}
    right = fx2relax.check(function, x, options=options)
    assert right.right, str(right)
    found = fx2relax.check(function, x, options={**options, "call_function_map": {target: wrong}})
    assert str(target) in {node.op for each in found.wrong for node in each.nodes}, str(found)


def test_a_result_that_is_what_was_given_is_named() -> None:
    options = {"call_function_map": {aten.neg.default: lambda x: x}}
    found = fx2relax.check(lambda x: (x.neg(), x.exp()), torch.randn(4, 16), options=options)
    assert [node.op for wrong in found.wrong for node in wrong.nodes] == ["aten.neg.default"]
