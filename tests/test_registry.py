"""Registering, finding and overriding converters."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F

import fx2relax
from fx2relax import registry
from fx2relax.compat import op
from fx2relax.converters.common import const
from fx2relax.registry import converts, lookup, overrides
from fx2relax.testing import assert_matches_eager


def test_taken_target_is_refused():
    with pytest.raises(fx2relax.RegistrationError, match=r"aten.add.Tensor has a converter"):
        converts(torch.ops.aten.add.Tensor)(lambda self, other, *, alpha=1: self)


def test_no_target_is_refused():
    with pytest.raises(fx2relax.RegistrationError, match="at least one target"):
        converts()
    with pytest.raises(fx2relax.RegistrationError, match="is no operator"):
        converts(3)(lambda x: x)


def test_a_packet_is_refused_with_its_overloads():
    with pytest.raises(fx2relax.RegistrationError, match=r"aten.add.Tensor"):
        converts(torch.ops.aten.add)(lambda x: x)


def test_override_on_purpose(monkeypatch):
    monkeypatch.setattr(registry, "_shipped", dict(registry._shipped))

    @converts(torch.ops.aten.add.Tensor, override=True)
    def mine(self, other, *, alpha=1):
        return op.subtract(self, other)

    assert lookup(torch.ops.aten.add.Tensor).function is mine


def test_scopes_nest_and_end():
    first, second = (lambda x: x), (lambda x: op.negative(x))
    assert lookup(torch.relu) is None
    with overrides({torch.relu: first}):
        with overrides({torch.relu: second}):
            assert lookup(torch.relu).function is second
        assert lookup(torch.relu).function is first
    assert lookup(torch.relu) is None


@pytest.mark.parametrize(
    ("target", "fn", "converter", "expected"),
    [
        (torch.relu, torch.relu, lambda x: op.negative(x), lambda x: -x),
        ("relu", lambda x: x.relu(), lambda x: op.negative(x), lambda x: -x),
        (
            F.scaled_dot_product_attention,
            lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
            lambda q, k, v, is_causal=False: op.add(q, v) if is_causal else q,
            lambda x: x + x,
        ),
    ],
    ids=["function", "method", "attention"],
)
def test_own_target_first_under_torch_compile(target, fn, converter, expected):
    x = torch.randn(1, 2, 3, 4)
    torch._dynamo.reset()
    with overrides({target: converter}):
        out = torch.compile(fn, backend="relax", fullgraph=True)(x)
    torch.testing.assert_close(out, expected(x))


def test_module_class_under_torch_compile():
    def doubled(module, x):
        assert module.in_features in (3, 4)
        product = op.matmul(x, op.permute_dims(module.weight))
        return op.multiply(op.add(product, module.bias), const(2.0, x))

    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    x = torch.randn(5, 4)
    torch._dynamo.reset()
    compiled = torch.compile(
        model,
        backend="relax",
        fullgraph=True,
        options={"call_module_map": {torch.nn.Linear: doubled}},
    )
    expected = model[2](torch.relu(model[0](x) * 2)) * 2
    torch.testing.assert_close(compiled(x), expected)


def test_third_party_converters_are_found(monkeypatch):
    module = types.ModuleType("someones_converters")

    class Entry:
        name, value = "someone", "someones_converters"

        @staticmethod
        def load():
            sys.modules["someones_converters"] = module

    def entry_points(*, group):
        assert group == "fx2relax.converters"
        return [Entry]

    monkeypatch.setattr(registry.importlib.metadata, "entry_points", entry_points)
    registry.load_third_party()
    assert sys.modules.pop("someones_converters") is module


def test_broken_third_party_converters_are_named(monkeypatch):
    class Entry:
        name, value = "someone", "someones_converters"

        @staticmethod
        def load():
            raise ImportError("no such file")

    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda *, group: [Entry])
    with pytest.raises(fx2relax.RegistrationError, match=r"someone .* no such file"):
        registry.load_third_party()


def test_a_decomposition_into_a_named_tuple():
    def declines(*args, **kwargs):
        raise fx2relax.Unsupported("any tensor")

    with overrides({torch.ops.aten.var_mean.correction: declines}):
        assert_matches_eager(torch.var_mean, torch.randn(3, 4), torch_calls=True)
