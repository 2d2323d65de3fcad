"""Weights: lifted once, seen when they change, shared with PyTorch."""

import weakref

import pytest
import torch
import tvm_ffi
from torch import nn

import fx2relax
from fx2relax.compat import op, relax
from fx2relax.params import InputSpec
from fx2relax.pipeline import lower
from fx2relax.runtime.weights import Weights
from fx2relax.testing import assert_matches_eager


class Normed(nn.Module):
    """A product with a weight that is an expression of two parameters."""

    def __init__(self):
        super().__init__()
        self.direction = nn.Parameter(torch.randn(6, 4))
        self.size = nn.Parameter(torch.rand(6, 1) + 0.5)

    def forward(self, x):
        weight = self.size * self.direction / (1 + self.direction.abs())
        return x @ weight.t()


def _functions(model, x, **options):
    """The names and call counts of what `lower` makes of a model with its weights lifted."""
    mod = fx2relax.from_fx(torch.fx.symbolic_trace(model), [x])
    lowered = lower(mod, lift_weights=True, **options)
    return {gv.name_hint: f for gv, f in lowered.functions_items()}


def test_work_on_weights_alone_is_lifted():
    functions = _functions(Normed(), torch.randn(3, 4))
    assert "main_transform_params" in functions
    main = functions["main"]
    shapes = [tuple(int(s) for s in p.ty.shape) for p in main.params[1:]]
    assert shapes == [(6, 4)], "the product's weight and nothing else"


def test_nothing_to_lift_keeps_the_signature():
    functions = _functions(nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4))
    assert "main_transform_params" not in functions
    assert [p.name for p in functions["main"].params[1:]] == ["0.weight", "0.bias"]


def test_broadcasts_stay_where_they_are():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([100, 4], "float32"))
    row = relax.Var("row", relax.TensorType([1, 4], "float32"))
    with builder.function("main", [x, row], attrs={"num_input": 1}):
        with builder.dataflow():
            wide = builder.emit(op.broadcast_to(op.negative(row), relax.ShapeExpr([100, 4])))
            out = builder.emit_output(op.multiply(wide, x))
        builder.emit_func_output(out)
    lowered = lower(builder.get(), lift_weights=True)
    main = {gv.name_hint: f for gv, f in lowered.functions_items()}["main"]
    assert [tuple(int(s) for s in p.ty.shape) for p in main.params] == [(100, 4), (1, 4)]


def _compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend="relax", fullgraph=True)


def _optimiser_step(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def _load(model):
    torch.manual_seed(9)
    model.load_state_dict(Normed().state_dict())


def _merge(model):
    model.direction.data += torch.randn(6, 1) @ torch.randn(1, 4)


def _replace(model):
    model.direction.data = torch.randn(6, 4)


def _copy(model):
    with torch.no_grad():
        model.size.mul_(3)


@pytest.mark.parametrize("change", [_optimiser_step, _load, _merge, _replace, _copy])
def test_a_change_is_seen_by_the_next_call(change):
    model, x = Normed(), torch.randn(3, 4)
    compiled = _compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    graphs = fx2relax.stats()["graphs"]
    change(model)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    assert fx2relax.stats()["graphs"] == graphs, "no recompilation"


def test_a_parameter_that_is_replaced_is_seen():
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    compiled = _compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        model.weight = nn.Parameter(torch.randn(3, 4))
        torch.testing.assert_close(compiled(x), model(x))


def test_inference_tensors_are_read_at_every_call():
    with torch.inference_mode():
        model, x = Normed(), torch.randn(3, 4)
        compiled = _compiled(model)
        torch.testing.assert_close(compiled(x), model(x))
        model.size.mul_(2)
        torch.testing.assert_close(compiled(x), model(x))


def test_lifted_once_for_many_calls(monkeypatch):
    from fx2relax.runtime import weights

    made = []
    renew = weights.Weights._renew
    monkeypatch.setattr(
        weights.Weights, "_renew", lambda self, *given: made.append(1) or renew(self, *given)
    )
    model, x = Normed(), torch.randn(3, 4)
    compiled = _compiled(model)
    with torch.no_grad():
        for _ in range(4):
            compiled(x)
    assert len(made) == 1


def test_tied_weights():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    x = torch.randn(3, 4)
    compiled = _compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        model[0].weight.mul_(2)
        torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(compiled(x), model(x))


def test_a_result_of_weights_alone():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 4))

        def forward(self, x):
            start = x.new_zeros(3).double() * (x.new_zeros(3) + 3).clamp(0)
            return start[torch.tensor([1, 0, 1])], self.weight.sum(0), self.weight

    class One(Fixed):
        def forward(self, x):
            return self.weight.sum(0)

    class Larger(nn.Module):
        def forward(self, x):
            return torch.eye((x + 1).size(0))[:, torch.tensor([0, 1, 1])].abs()

    for model in (Fixed(), One(), Larger()):
        with torch.no_grad():
            assert_matches_eager(model, torch.randn(2, 3))


def test_results_that_are_not_computed_are_fresh_at_every_call():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 4))

        def forward(self, x):
            return x * 2, torch.zeros(3), torch.arange(4.0), self.weight.t().contiguous() * 1

    torch._dynamo.reset()
    model = Fixed()
    fn = torch.compile(model, backend="relax")
    with torch.no_grad():
        for _ in range(3):
            results = fn(torch.ones(2))
            for result, expected in zip(results, model(torch.ones(2)), strict=True):
                assert torch.equal(result, expected)
                result.add_(5)


def _held(transformed, *weights):
    """`Weights` of two matrices of which a sum is taken, that counts how often."""

    def transform(tensors):
        transformed.append(1)
        a, b = (torch.from_dlpack(t) for t in tensors)
        return [tvm_ffi.from_dlpack(a + b)]

    specs = [InputSpec(str(i), "parameter", w.detach().clone()) for i, w in enumerate(weights)]
    return Weights(specs, transform)


def test_modules_that_share_a_program_are_remembered_each():
    transformed = []
    first, second = ((torch.randn(3, 4), torch.randn(3, 4)) for _ in range(2))
    held = _held(transformed, *first)
    for _ in range(3):
        for pair in (first, second):
            torch.testing.assert_close(torch.from_dlpack(held.get(pair)[0]), sum(pair))
    assert len(transformed) == 2
    second[1].add_(1)
    torch.testing.assert_close(torch.from_dlpack(held.get(second)[0]), sum(second))
    torch.testing.assert_close(torch.from_dlpack(held.get(first)[0]), sum(first))
    assert len(transformed) == 3


@pytest.mark.parametrize("grad", [False, True])
def test_what_was_made_goes_with_its_weights(grad):
    weights = [nn.Parameter(torch.randn(3, 4), requires_grad=grad) for _ in range(2)]
    held = _held([], *weights)
    gone = weakref.ref(weights[0])
    held.get(weights)
    del weights
    assert gone() is None
    assert not held._sets
    assert held._last is None
