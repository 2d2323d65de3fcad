"""`export`: several functions of a model over one list of weights."""

import numpy as np
import pytest
import torch
import tvm
from torch import nn
from tvm import relax, tirx

import fx2relax
from fx2relax import Dim, Tensor


class Gated(nn.Module):
    """Projections side by side, and a counter that is written to."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 16, bias=False)
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)
        self.unread = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def prefill(self, x):
        both = torch.cat([self.gate.weight, self.up.weight])
        gate, up = nn.functional.linear(x, both).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)

    def decode(self, x, *, past=None):
        self.calls += 1
        return {"y": self.prefill(x) + past[0], "rows": x.shape[0]}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Gated().eval()


def params(exported, name):
    return [str(p.name) for p in exported.mod[name].params]


WEIGHTS = ["gate.weight", "up.weight", "down.weight"]


def test_functions_share_one_list_of_weights(model):
    exported = fx2relax.export(
        model,
        {
            "prefill": {"x": Tensor(("batch", "seq", 8))},
            "decode": {"x": Tensor(("batch", 1, 8)), "past": (Tensor((8,)),)},
        },
    )
    assert params(exported, "prefill") == ["x", *WEIGHTS]
    assert params(exported, "decode") == ["x", "past_0", "calls", *WEIGHTS]
    assert int(exported.mod["prefill"].attrs["num_input"]) == 1
    assert int(exported.mod["decode"].attrs["num_input"]) == 3
    assert [p.kind for p in exported.params.values()] == ["parameter"] * 3 + ["state"]
    assert exported.params.unused == {"unread.weight", "unread.bias"}
    relax.analysis.well_formed(exported.mod)  # raises
    assert exported.params["up.weight"].data.data_ptr() == model.up.weight.data_ptr()
    assert model.calls == 0


def test_a_function_of_the_user_over_the_weights(model):
    def scores(x):
        return model.gate(x).softmax(-1)

    exported = fx2relax.export(model, {"scores": (scores, {"x": Tensor((2, 8))})})
    assert params(exported, "scores") == ["x", "gate.weight"]


class Widths(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(16, 4, bias=False)
        self.up = nn.Linear(4, 6, bias=False)
        self.down = nn.Linear(6, 4, bias=False)

    def forward(self, state):
        return self.down(nn.functional.silu(self.up(self.embedding(state))))


def _same_var():
    size = tirx.Var("hidden", "int64")
    return size, size


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        (("hidden", "hidden"), 1),
        (("hidden", "inner"), 2),
        (_same_var(), 1),
        ((tirx.Var("hidden", "int64"), tirx.Var("inner", "int64")), 2),
        ((tirx.Var("hidden", "int64"), tirx.Var("hidden", "int64")), 2),
    ],
    ids=["one name", "two names", "one variable", "two variables", "two variables of one name"],
)
def test_duplicate_names(sizes, count):
    hidden, inner = sizes
    exported = fx2relax.export(
        Widths(),
        {"forward": {"state": Tensor(("batch", 16))}},
        weights={
            "embedding.weight": (hidden, 16),
            "up.weight": (inner, hidden),
            "down.weight": (hidden, inner),
        },
    )
    assert len(relax.analysis.defined_symbolic_vars(exported.mod["forward"])) == count + 1
    assert (
        len({n for p in exported.params.values() for n in p.shape if isinstance(n, str)}) == count
    )
    relax.analysis.well_formed(exported.mod)  # raises


def test_linear_dynamic_shape():
    exported = fx2relax.export(
        nn.Linear(4, 7),
        {"forward": {"input": Tensor((1, 4))}},
        weights={"weight": ("n", 4), "bias": ("n",)},
    )
    result = exported.mod["forward"].ret_ty.shape.values
    weight, bias = [p.ty.shape.values[0] for p in exported.mod["forward"].params[1:]]
    assert result[1].same_as(weight)
    assert weight.same_as(bias)
    assert exported.params.unbound == ["weight", "bias"]
    exported.params.load_state_dict({"weight": torch.ones(9, 4), "bias": torch.ones(9)})
    with pytest.raises(ValueError, match="size n is 8, and 9 in weight"):
        exported.params["bias"] = torch.ones(8)


def test_a_branch_on_a_size_needs_its_bounds():
    class Branch(nn.Module):
        def forward(self, x):
            return x * 2 if x.shape[0] > 4 else x

    with pytest.raises(fx2relax.ImportFailure, match=r"forward: the size n .*n > 4"):
        fx2relax.export(Branch(), {"forward": {"x": Tensor(("n",))}})
    exported = fx2relax.export(Branch(), {"forward": {"x": Tensor((Dim("n", min=5),))}})
    assert exported.sizes["n"].min == 5


def test_divisible_sizes_and_derived_ones():
    class Halves(nn.Module):
        def forward(self, x, y):
            return x.reshape(-1, 2).sum(-1) + y

    exported = fx2relax.export(Halves(), {"forward": {"x": Tensor(("2*n",)), "y": Tensor(("n",))}})
    relax.analysis.well_formed(exported.mod)  # raises
    exported = fx2relax.export(
        Halves(), {"forward": {"x": Tensor((Dim("n", multiple_of=2, max=64),)), "y": Tensor((1,))}}
    )
    assert dict(exported.mod["forward"].attrs["tir_var_upper_bound"]) == {"n": 64}


def test_one_name_with_two_bounds_is_an_error(model):
    with pytest.raises(ValueError, match="are one size"):
        fx2relax.export(model, {"prefill": {"x": Tensor((Dim("n", max=4), Dim("n", max=5), 8))}})


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({}, "no function"),
        ({"nothing": {}}, "no method 'nothing'"),
        ({"prefill": {}}, "prefill: there is no spec for its parameter 'x'"),
        ({"prefill": {"x": Tensor((1, 8)), "z": 1}}, "prefill: it has no parameter 'z'"),
        ({"prefill": {"x": Tensor((1, 7))}}, "prefill: .*"),
        ({"prefill": {"x": Tensor(("n +", 8))}}, "is no size"),
        ({"a-b": {}}, "identifier"),
        ({"prefill": {"x": Tensor((1, 8), "float33")}}, "unknown dtype 'float33'"),
    ],
)
def test_what_is_wrong_is_said(model, functions, message):
    with pytest.raises((ValueError, fx2relax.ImportFailure), match=message):
        fx2relax.export(model, functions)


def test_operators_of_all_functions_are_refused_at_once():
    class Draws(nn.Module):
        def one(self, x):
            return x + torch.rand_like(x)

        def two(self, x):
            return torch.bernoulli(x)

    spec = {"x": Tensor((3,))}
    with pytest.raises(fx2relax.UnsupportedOpError) as caught:
        fx2relax.export(Draws(), {"one": spec, "two": spec})
    assert {m.name for m in caught.value.missing} == {
        "aten.rand.default",
        "aten.bernoulli.default",
    } or len(caught.value.missing) == 2


def test_an_attribute_that_is_no_buffer_cannot_be_set():
    class Sets(nn.Module):
        def forward(self, x):
            self.last = x + 1
            return x

    module = Sets()
    with pytest.raises(fx2relax.ImportFailure, match="it sets last, which is no buffer"):
        fx2relax.export(module, {"forward": {"x": Tensor((3,))}})
    assert not hasattr(module, "last")


def test_a_buffer_that_is_set_is_a_state():
    class Sets(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("last", torch.zeros(3))

        def forward(self, x):
            self.last = self.last + x
            return x * 2

        def read(self):
            return self.last * 1

    module = Sets()
    exported = fx2relax.export(module, {"forward": {"x": Tensor((3,))}, "read": {}})
    assert params(exported, "read") == ["last"]
    assert int(exported.mod["read"].attrs["num_input"]) == 1
    assert module.last.sum() == 0


def test_weights_without_data():
    with torch.device("meta"):
        module = nn.Linear(3, 2)
    exported = fx2relax.export(module, {"forward": {"input": Tensor((1, 3))}})
    assert exported.params.unbound == ["weight", "bias"]
    with pytest.raises(fx2relax.WeightError) as caught:
        exported.params.load_state_dict({"weight": torch.ones(2, 4), "bias": torch.ones(3)})
    assert "weight: its shape is (2, 3), not (2, 4)" in str(caught.value)
    assert "bias: its shape is (2,), not (3,)" in str(caught.value)
    with pytest.raises(ValueError, match=r"(?s)missing: 1\n  bias.*unexpected: 1\n  scale"):
        exported.params.load_state_dict({"weight": torch.ones(2, 3), "scale": torch.ones(3)})
    assert exported.params.unbound == ["weight", "bias"]
    found = exported.params.load_state_dict({"weight": torch.ones(2, 3), "s": 0}, strict=False)
    assert found == (["bias"], ["s"])


def test_an_exported_program_keeps_its_ranges():
    class Double(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x):
            self.seen.add_(1)
            return x * 2

    rows = torch.export.Dim("rows", min=2, max=32)
    program = torch.export.export(Double(), (torch.ones(3, 4),), dynamic_shapes=({0: rows},))
    exported = fx2relax.from_exported_program(program)
    (size,) = exported.sizes.values()
    assert (size.min, size.max) == (2, 32)
    assert params(exported, "main") == ["x", "seen"]
    assert exported.functions["main"].states == ["seen"]


def test_what_is_no_module_is_refused():
    with pytest.raises(ValueError, match=r"takes a torch\.nn\.Module, not function"):
        fx2relax.export(lambda x: x, {"forward": {"x": Tensor((3,))}})


def test_weights_share_memory_with_what_is_bound():
    with torch.device("meta"):
        module = nn.Linear(3, 2)
    exported = fx2relax.export(module, {"forward": {"input": Tensor((1, 3))}})
    array = np.ones((2, 3), np.float32)
    array.flags.writeable = False  # as a mapped file
    bias = torch.ones(2)
    exported.params.load_state_dict({"weight": array, "bias": bias})
    assert exported.params["weight"].data.data_ptr() == array.ctypes.data
    assert exported.params["bias"].data.data_ptr() == bias.data_ptr()
    exported.params["bias"] = tvm.runtime.tensor(np.zeros(2, np.float32))
    assert exported.params["bias"].data.tolist() == [0, 0]
    exported.params["bias"] = None
    assert exported.params.unbound == ["bias"]


def test_an_exported_program_keeps_buffers_that_are_not_saved():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.tensor([2.0, 3.0]), persistent=False)
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x) * self.scale) + torch.tensor([1.0, 2.0])

    program = torch.export.export(Scaled(), (torch.ones(3, 2),))
    exported = fx2relax.from_exported_program(program)
    assert set(exported.params) == {
        *("first.weight", "first.bias", "second.bias", "scale", "constant_0"),
    }
    assert params(exported, "main") == ["x", *exported.params]
    relax.analysis.well_formed(exported.mod)  # raises


def test_a_dtype_is_chosen_before_weights_are_lifted():
    with torch.device("meta"):
        module = nn.Linear(3, 2)
    exported = fx2relax.export(module, {"forward": {"input": Tensor((1, 3))}})
    with pytest.raises(ValueError, match="call `to` before `lift`"):
        exported.lift().to("float16")
