"""`check` finds the kernels that are wrong, by name, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fx2relax
from fx2relax import registry
from fx2relax.compat import op
from fx2relax.differences import difference

aten = torch.ops.aten


pytestmark = pytest.mark.usefixtures("fresh")


class Layer(nn.Module):
    def __init__(self, width: int, odd: bool) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.narrow, self.odd = nn.Linear(2 * width, width), odd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.wide(self.norm(x))
        hidden = torch.erfc(hidden) if self.odd else F.gelu(hidden)
        return x + self.narrow(hidden)


def _net(odd: int | None = None, layers: int = 12) -> nn.Module:
    return nn.Sequential(*[Layer(32, odd=n == odd) for n in range(layers)]).eval()


def _wrong_erfc(x: Any) -> Any:
    """Wrong where x is positive, by a thousandth."""
    return op.add(
        op.subtract(fx2relax.converters.common.relax.const(1.0, "float32"), op.erf(x)),
        op.multiply(fx2relax.converters.common.relax.const(1e-3, "float32"), op.nn.relu(x)),
    )


WRONG = {"call_function_map": {aten.erfc.default: _wrong_erfc}}


@pytest.mark.parametrize("library", ["torch", "none"])
def test_a_wrong_converter_is_named(library: str) -> None:
    found = fx2relax.check(_net(odd=7), torch.randn(9, 32), options={**WRONG, "library": library})
    assert not found.right
    (wrong,) = found.wrong
    assert "erfc" in [node.name for node in wrong.nodes]
    (node,) = [node for node in wrong.nodes if node.name == "erfc"]
    assert node.line.code == "hidden = torch.erfc(hidden) if self.odd else F.gelu(hidden)"
    assert node.layer == "7"
    assert 1e-4 < wrong.error < 1e-2
    assert "aten.erfc.default" in str(found)
    assert "test_check.py" in str(found)
    assert found.kernels > 30


def test_all_ways_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FX2RELAX_NEVER_SLOWER", "1")
    found = fx2relax.check(_net(odd=1, layers=2), torch.randn(9, 32), options=WRONG)
    assert found.programs == 2
    assert {wrong.program for wrong in found.wrong} == {"torch", "generated"}


def _raises(x: Any) -> Any:
    raise ValueError("no such function")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda x: op.astype(x, "float64"), 'gives R.Tensor((9, 64), dtype="float64")'),
        (_raises, "ValueError: no such function"),
        (lambda x: op.sum(x, axis=0), "gives R.Tensor((64,)"),
    ],
)
def test_a_graph_that_cannot_be_compiled_is_told_of(wrong: Any, reason: str) -> None:
    options = {"call_function_map": {aten.erfc.default: wrong}}
    found = fx2relax.check(_net(odd=0, layers=1), torch.randn(9, 32), options=options)
    assert not found.right
    (failed,) = found.failed
    assert failed.graph == "inference 0"
    assert reason in failed.reason
    assert "hidden = torch.erfc(hidden)" in failed.reason
    assert found.as_dict()["failed"] == [{"graph": "inference 0", "reason": failed.reason}]
    assert str(found).startswith("0 kernels of 0 programs compared with PyTorch: 1 failed\n")
    assert failed.reason in str(found)


def test_a_second_program_that_cannot_be_compiled_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fx2relax import pipeline

    monkeypatch.setenv("FX2RELAX_NEVER_SLOWER", "1")
    lower = pipeline.lower

    def fails(mod: Any, library: str, **how: Any) -> Any:
        if library == "generated":
            raise RuntimeError("no schedule")
        return lower(mod, library=library, **how)

    monkeypatch.setattr(pipeline, "lower", fails)
    found = fx2relax.check(_net(layers=1), torch.randn(9, 32))
    assert [str(each) for each in found.failed] == [
        "another program of inference 0 runs in PyTorch: RuntimeError: no schedule"
    ]


def test_a_call_that_a_program_does_not_take_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    from fx2relax import lockstep
    from fx2relax.errors import ArgumentError

    def refuses(*arguments: Any) -> Any:
        raise ArgumentError("argument 'x': shape")

    monkeypatch.setattr(lockstep.Lockstep, "run", refuses)
    found = fx2relax.check(_net(layers=1), torch.randn(9, 32), options={"library": "torch"})
    assert [each.reason for each in found.failed] == ["ArgumentError: argument 'x': shape"]


def test_nothing_to_compile() -> None:
    found = fx2relax.check(lambda x: x, torch.randn(9))
    assert found.programs == 0
    assert "nothing was compiled" in str(found)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32))
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = F.max_pool2d(F.relu(self.second(x) + x), 2)
        return self.head(F.dropout(x.mean((2, 3)), 0.2, self.training)).softmax(-1)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("library", ["torch", "none"])
@pytest.mark.parametrize("grad", [False, True])
def test_what_is_right_is_found_right(grad: bool, library: str) -> None:
    x = torch.randn(2, 16, 20, 20, requires_grad=grad)
    found = fx2relax.check(Convolutions().train(grad), x, grad=grad, options={"library": library})
    assert found.right, str(found)
    assert found.programs == 1 + grad
    assert found.kernels >= 6
    assert "all right" in str(found)


class Shortcut(nn.Module):
    """Two convolutions whose scales are a part of their weights, and whose shifts are not."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(16, 32, size, padding=size // 2, bias=False), nn.BatchNorm2d(32)
            )
            for size in (3, 1)
        )
        for side in self.sides:
            side[1].running_var.uniform_(0.1, 0.3)
            side[1].running_mean.normal_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.sides[0](x) + self.sides[1](x))
        return F.max_pool2d(y, 3, 1, 1).mean((2, 3))


@pytest.mark.parametrize("library", ["torch", "none"])
def test_a_scaled_product_is_no_product(library: str) -> None:
    x = torch.randn(2, 16, 32, 32)  # as many rows and columns as channels: no shape tells which
    found = fx2relax.check(Shortcut().eval(), x, options={"library": library})
    assert found.right, str(found)
    assert found.kernels


def test_a_wrong_gradient_is_named() -> None:
    def wrong(builder_free_grad: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        return op.multiply(
            builder_free_grad, fx2relax.converters.common.relax.const(1.01, "float32")
        )

    options = {"call_function_map": {aten.gelu_backward.default: wrong}}
    found = fx2relax.check(_net(layers=1).train(), torch.randn(9, 32), grad=True, options=options)
    assert {wrong.graph for wrong in found.wrong} == {"backward 1"}
    assert "gelu_backward" in found.wrong[0].nodes[0].op or any(
        "gelu" in node.op or "erf" in node.op for node in found.wrong[0].nodes
    )


def test_symbolic_sizes_and_half_precision() -> None:
    found = fx2relax.check(_net(layers=2), torch.randn(9, 32), dynamic=True)
    assert found.right, str(found)
    found = fx2relax.check(_net(layers=2).bfloat16(), torch.randn(9, 32).bfloat16())
    assert found.right, str(found)


class Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = torch.cond(
            x.sum() > 0, lambda v: torch.erfc(self.layer(v)).sin(), lambda v: v.cos(), (x,)
        )
        return chosen.exp().softmax(-1)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("library", ["torch", "none"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_wrong_converter_in_a_branch(library: str, dynamic: bool | None) -> None:
    options = {**WRONG, "library": library}
    x = torch.rand(4, 16)
    found = fx2relax.check(Choice().eval(), x, options=options, dynamic=dynamic)
    assert [node.op for wrong in found.wrong for node in wrong.nodes] == ["higher_order.cond"]
    assert fx2relax.check(Choice().eval(), -x, options=options, dynamic=dynamic).right


def test_random_numbers_are_drawn_once() -> None:
    found = fx2relax.check(lambda x: torch.rand_like(x).sin() + x, torch.randn(64))
    assert found.right, str(found)


def test_a_script_fails_in_the_same_way(tmp_path: Path) -> None:
    (script,) = fx2relax.reproduce(
        _net(odd=0, layers=1),
        torch.randn(9, 32),
        folder=tmp_path,
        options={**WRONG, "library": "torch"},
    )
    text = script.read_text(encoding="utf-8")
    assert "aten.erfc.default" in text
    environment = dict(os.environ, FX2RELAX_CACHE="0")
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300
    )
    # The shipped converter is right.
    assert (done.returncode, done.stderr) == (0, "")
    assert "all right" in done.stdout
    planted = text.replace(
        "import fx2relax\n",
        "import fx2relax\nimport test_check\n"
        "fx2relax.converts(torch.ops.aten.erfc.default, override=True)(test_check._wrong_erfc)\n",
    )
    script.write_text(planted, encoding="utf-8")
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), *filter(None, [environment.get("PYTHONPATH")])]
    )
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1, done.stderr
    assert "erfc" in done.stdout


@pytest.mark.parametrize(
    ("got", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([float("nan")], [float("nan")], 0.0),
        ([float("inf"), 1.0], [float("inf"), 1.0], 0.0),
        ([float("inf")], [float("-inf")], float("inf")),
        ([float("nan")], [1.0], float("inf")),
        ([1.0], [float("nan")], float("inf")),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([], [], 0.0),
    ],
)
def test_differences(got: list[float], expected: list[float], error: float) -> None:
    assert difference(torch.tensor(got), torch.tensor(expected))[0] == pytest.approx(error)


def test_differences_of_other_kinds() -> None:
    whole = torch.tensor([[1, 2], [3, 4]])
    assert difference(whole, whole) == (0.0, "")
    error, reason = difference(whole, whole.where(whole != 3, 7))
    assert error == float("inf")
    assert reason == "1 of 4 elements, such as 3 at [1, 0], and not 7"
    assert difference(whole, whole[0])[1] == "shape (2, 2), and not (2,)"
    assert difference(whole, whole.float())[1] == "torch.int64, and not torch.float32"


def test_memory_does_not_grow_with_the_layers() -> None:
    """Values of a layer are let go of before the next but one is run."""
    import weakref

    from fx2relax import lockstep

    live: list[int] = []
    kept: list[Any] = []
    forget = lockstep.Lockstep._done

    def spy(self: Any, node: Any) -> None:
        forget(self, node)
        kept.append(weakref.ref(self))
        tensors = [v for n, v in self._interpreter.env.items() if n.op != "placeholder"]
        live.append(sum(isinstance(v, torch.Tensor) for v in tensors))

    lockstep.Lockstep._done = spy  # type: ignore[method-assign]
    try:
        fx2relax.check(_net(layers=3), torch.randn(9, 32), options={"library": "torch"})
        few = max(live)
        live.clear()
        fx2relax.check(_net(layers=12), torch.randn(9, 32), options={"library": "torch"})
    finally:
        lockstep.Lockstep._done = forget  # type: ignore[method-assign]
    assert max(live) <= few + 1


ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


@pytest.mark.sweep(6)
@pytest.mark.parametrize("library", ["torch", "none"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_attention_without_dropout_draws_nothing(library: str, dynamic: bool | None) -> None:
    """It is compared as any other node, whether a kernel makes it alone or with others."""
    shipped = registry.registered()[ATTENTION].function

    def wrong(*given: Any, **named: Any) -> Any:
        made = fx2relax.converters.common.emit(shipped(*given, **named)[0])
        return op.multiply(made, fx2relax.converters.common.const(1.01, made)), None

    def net(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = F.scaled_dot_product_attention(x.sin(), x, x.cos())
        return (x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1) @ w).relu()

    def alone(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    given = torch.randn(2, 4, 6, 8), torch.randn(32, 16)
    for function in (net, alone):
        options = {"library": library}
        right = fx2relax.check(function, *given, options=options, dynamic=dynamic)
        assert right.right, str(right)
        assert right.kernels
        options["call_function_map"] = {ATTENTION: wrong}
        found = fx2relax.check(function, *given, options=options, dynamic=dynamic)
        named = {node.op for each in found.wrong for node in each.nodes}
        assert str(ATTENTION) in named, str(found)


def test_what_breaks_while_comparing_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the model's own code catches it, and calls again."""
    from fx2relax import lockstep

    def breaks(*values: Any) -> Any:
        raise TypeError("not comparable")

    def calls(inner: Any, x: torch.Tensor) -> torch.Tensor:
        try:
            return inner(x)
        except TypeError:
            return inner(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _net(layers=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch._dynamo.disable(calls, recursive=False)(self.inner, x)

    monkeypatch.setattr(lockstep, "difference", breaks)
    with pytest.raises(TypeError, match="not comparable"):
        fx2relax.check(Net(), torch.randn(9, 32), options={"library": "torch"})
