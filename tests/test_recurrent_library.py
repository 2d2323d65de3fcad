"""LSTMs in bfloat16 that oneDNN computes: eager's bits, packed weights, and where they are not."""

from __future__ import annotations

import pytest
import torch
import tvm_ffi
from library_calls import function, lowered, passed
from networks.check import export
from torch import nn
from torch.utils._pytree import tree_leaves

import fx2relax
from fx2relax import onednn
from fx2relax.runtime import library, native
from fx2relax.runtime.packed_at_use import packed_at_use
from fx2relax.testing import assert_matches_eager

SAME = (0.0, 0.0)
pytestmark = [
    pytest.mark.skipif(not onednn.computes_in("bfloat16"), reason="oneDNN has no bfloat16 here"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]
needs_compiler = pytest.mark.skipif(not native.use(), reason="no C++ compiler")
# What is compiled runs, however fast eager is.
COMPILED = {"never_slower": False, "library": "torch"}


class Cast(nn.Module):
    """A module under autocast."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(*inputs)


def lstm(*sizes: int, **settings) -> nn.LSTM:
    torch.manual_seed(0)
    return nn.LSTM(*sizes, **settings).requires_grad_(False).eval()


def random(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes).bfloat16()


SETTINGS = [
    {},
    {"bias": False},
    {"num_layers": 2, "bidirectional": True},
    {"batch_first": True, "num_layers": 2, "dropout": 0.5},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_bits_are_eager_s(settings):
    module = lstm(19, 37, **settings)
    assert_matches_eager(Cast(module), torch.randn(5, 3, 19), tol=SAME, options=COMPILED)
    assert_matches_eager(module.bfloat16(), random(5, 3, 19), tol=SAME, options=COMPILED)


def test_given_states_and_no_batch():
    module = lstm(19, 37, bidirectional=True).bfloat16()
    states = random(2, 3, 37), random(2, 3, 37)
    assert_matches_eager(module, random(5, 3, 19), states, tol=SAME, options=COMPILED)
    assert_matches_eager(module, random(5, 19), tol=SAME, options=COMPILED)
    turned = random(3, 5, 19).transpose(0, 1)
    assert_matches_eager(module, turned, tol=SAME, options=COMPILED)


def test_not_a_number_and_infinities():
    x = random(4, 3, 5)
    x[1, 0, 2], x[2, 1, 0], x[0, 2, 1] = float("nan"), float("inf"), -float("inf")
    assert_matches_eager(lstm(5, 8).bfloat16(), x, tol=SAME, options=COMPILED)


def test_no_elements():
    assert_matches_eager(lstm(5, 8).bfloat16(), random(4, 0, 5), options=COMPILED)


def test_sizes_that_change_are_compiled_once():
    torch._dynamo.reset()
    module, before = lstm(19, 37).bfloat16(), fx2relax.stats()["graphs"]
    compiled = torch.compile(module, backend="relax", dynamic=True, options=COMPILED)
    for steps, batch in ((5, 3), (64, 8), (2, 200)):
        x = random(steps, batch, 19)
        for got, wanted in zip(tree_leaves(compiled(x)), tree_leaves(module(x)), strict=True):
            assert torch.equal(got, wanted)
    assert fx2relax.stats()["graphs"] == before + 1


def nodes(module: nn.Module, *inputs: torch.Tensor) -> list[str]:
    """The operators of the graphs that a module is compiled to."""
    found = fx2relax.explain(module, *inputs)
    return [node.op for graph in found.data.graphs for node in graph.nodes]


@pytest.mark.parametrize("kind", ["float32", "projected", "switched off"])
def test_what_eager_does_not_leave_to_onednn_in_bfloat16(kind, request):
    module, x = (
        lstm(5, 8, **({"proj_size": 3} if kind == "projected" else {})),
        torch.randn(4, 3, 5),
    )
    if kind != "float32":
        module, x = module.bfloat16(), x.bfloat16()
    if kind == "switched off":
        request.addfinalizer(lambda: torch._C._set_mkldnn_enabled(True))
        torch._C._set_mkldnn_enabled(False)  # `torch.backends` warns of Intel's GPUs
    operators = nodes(module, x)
    assert any("recurrence" in name for name in operators), operators
    assert not any("mkldnn_rnn_layer" in name for name in operators), operators
    assert_matches_eager(module, x, options=COMPILED)


def test_gradients():
    module = lstm(5, 8).bfloat16().requires_grad_()
    assert_matches_eager(module, random(4, 3, 5), options=COMPILED, grad=True)


def test_what_eager_leaves_to_onednn():
    assert any("mkldnn_rnn_layer" in name for name in nodes(lstm(5, 8).bfloat16(), random(4, 3, 5)))


def test_generated_kernels():
    module, x = lstm(19, 37, bidirectional=True, batch_first=True).bfloat16(), random(3, 5, 19)
    assert_matches_eager(module, x, options={**COMPILED, "library": "none"})
    mod = fx2relax.from_fx(export(module, (x,), {}), [x])
    assert "fx2relax.library" not in mod.script()


@needs_compiler
def test_weights_are_packed_once_and_a_changed_one_is_seen(monkeypatch):
    module, x = lstm(64, 64, num_layers=2).bfloat16(), random(5, 3, 64)
    text, run = lowered(module, x, monkeypatch=monkeypatch, rtol=0, atol=0)
    assert text.count("library.pack_lstm") == text.count("library.packed_lstm") * 2 == 4
    module.weight_hh_l1.mul_(2)
    for got, wanted in zip(tree_leaves(run(x)), tree_leaves(module(x)), strict=True):
        assert torch.equal(got, wanted)


@needs_compiler
def test_weights_of_one_layer_that_runs_both_ways(monkeypatch):
    """A weight has one order: the other run takes it as it lies."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = lstm(64, 64).bfloat16()

        def forward(self, x):
            long, _ = self.lstm(x)
            short, _ = self.lstm(long[:2])
            return long, short

    text, _ = lowered(Both(), random(5, 3, 64), monkeypatch=monkeypatch, rtol=0, atol=0)
    calls = [text.count(f"library.{name}_lstm") for name in ("pack", "packed", "new")]
    assert calls == [2, 1, 1]


def operands(time=5, batch=3, features=19, size=37):
    gates = 4 * size
    weights = [random(gates, features), random(gates, size), random(gates), random(gates)]
    return [random(time, batch, features), *weights, random(1, batch, size), random(1, batch, size)]


@needs_compiler
@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("biased", [0, 1])
@pytest.mark.parametrize("hint", [(), (5, 3), (64, 8)])
def test_the_helper_s_calls(reverse, biased, hint):
    given, settings = operands(), tvm_ffi.Shape((reverse, biased))
    wanted = library.FUNCTIONS["new_lstm"](*passed(*given), settings)
    before = native.declined()
    plain = function("new_lstm")(*passed(*given), settings)
    shapes = [tvm_ffi.Shape((n, 19, 37, reverse, biased, *hint)) for n in (0, 1)]
    with packed_at_use(given[1:2]):  # one of them is packed by each call
        held = [
            function("pack_lstm")(*passed(weight), shape)
            for weight, shape in zip(given[1:3], shapes, strict=True)
        ]
        packed = function("packed_lstm")(*passed(given[0]), *held, *passed(*given[3:]), settings)
    for results in (plain, packed):
        for got, expected in zip(results, wanted, strict=True):
            assert torch.equal(torch.from_dlpack(got), expected)
    assert native.declined() == before


@needs_compiler
def test_errors_of_the_helper_s_calls():
    given, settings = operands(), tvm_ffi.Shape((0, 1))
    with pytest.raises(RuntimeError):
        function("pack_lstm")(*passed(given[0]), tvm_ffi.Shape((0, 19, 37, 0, 1)))
    with pytest.raises(RuntimeError):
        function("packed_lstm")(*passed(*given[:6]), settings)
    given[1] = random(4 * 37, 5)
    with pytest.raises(RuntimeError):
        function("packed_lstm")(*passed(*given), settings)
