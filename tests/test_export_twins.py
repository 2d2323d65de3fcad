"""What TVM's own exporter does for its `nn.Module`, done for PyTorch's."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from tvm import relax, tirx

import fx2relax
from fx2relax import Tensor


def operators(function):
    """The names of the operators that a function calls, in order."""
    found = []

    def visit(expr):
        if isinstance(expr, relax.Call) and hasattr(expr.op, "name"):
            found.append(str(expr.op.name).removeprefix("relax."))

    relax.analysis.post_order_visit(function, visit)
    return found


def names(function):
    return [str(p.name) for p in function.params]


def test_a_module_of_pytorchs():
    exported = fx2relax.export(nn.ReLU(), {"forward": {"input": Tensor((3, 3))}})
    function = exported.mod["forward"]
    assert names(function) == ["input"]
    assert int(function.attrs["num_input"]) == 1
    assert [int(s) for s in function.ret_ty.shape.values] == [3, 3]
    assert "with R.dataflow()" in exported.mod.script()


def test_debug_adds_an_object_for_effects():
    exported = fx2relax.export(nn.ReLU(), {"forward": {"input": Tensor((3, 3))}}, debug=True)
    function = exported.mod["forward"]
    assert names(function) == ["input", "_io"]
    assert int(function.attrs["num_input"]) == 2
    result, effects = function.ret_ty.fields
    assert [int(s) for s in result.shape.values] == [3, 3]
    assert len(effects.fields) == 1
    begun = exported.mod["_initialize_effect"]
    assert operators(begun) == ["null_value"]
    assert len(begun.ret_ty.fields) == 1


def test_a_size_of_several_functions():
    class Two(nn.Module):
        def forward_relu(self, x):
            return x.relu()

        def forward_silu(self, x):
            return nn.functional.silu(x)

    size = tirx.Var("batch_size", "int64")
    for given in (size, "batch_size"):
        spec = {"x": Tensor((given, 8))}
        exported = fx2relax.export(Two(), {"forward_relu": spec, "forward_silu": spec})
        relax.analysis.well_formed(exported.mod)  # raises
        for name in ("forward_relu", "forward_silu"):
            (var,) = relax.analysis.defined_symbolic_vars(exported.mod[name])
            assert var.name == "batch_size"


class LlamaMLP(nn.Module):
    def __init__(self, hidden_size, intermediate_size, joined=False):
        super().__init__()
        options = {"dtype": torch.float16, "bias": False}
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, **options)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, **options)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **options)
        self.joined = joined

    def forward(self, x):
        if self.joined:
            weight = torch.cat([self.gate_proj.weight, self.up_proj.weight])
            gate, up = nn.functional.linear(x, weight).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(nn.functional.silu(gate) * up)


WEIGHTS = ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]


def on_meta(**options):
    """Weights of that size are never made."""
    with torch.device("meta"):
        return LlamaMLP(4096, 11008, **options)


def test_weights_of_modules_within_modules():
    exported = fx2relax.export(on_meta(), {"forward": {"x": Tensor(("n", 4096), "float16")}})
    function = exported.mod["forward"]
    assert names(function) == ["x", *WEIGHTS]
    assert [str(p.ty.dtype) for p in function.params] == ["float16"] * 4
    found = sorted(o for o in operators(function) if o != "astype")
    assert found == sorted(["permute_dims", "matmul"] * 3 + ["nn.silu", "multiply"])


def test_weights_that_are_made_of_other_weights():
    spec = {"forward": {"x": Tensor(("n", 4096), "float16")}}
    exported = fx2relax.export(on_meta(joined=True), spec)
    function = exported.mod["forward"]
    assert names(function) == ["x", *WEIGHTS]  # as a file of weights names them
    assert operators(function).count("concat") == 1
    assert operators(function).count("matmul") == 2
    lifted = exported.lift()
    function = lifted.mod["forward"]
    assert len(function.params) == 3
    assert not {"concat", "permute_dims"} & set(operators(function))
    sizes = [[int(s) for s in p.ty.shape.values] for p in function.params[1:]]
    assert sorted(sizes) == [[4096, 22016], [11008, 4096]]
    transform = operators(lifted.mod["transform_params"])
    assert sorted(transform) == ["concat", "permute_dims", "permute_dims"]
    assert exported.params is lifted.params


class Lora(nn.Module):
    """What `torch.nn.utils.parametrize` adds to a weight."""

    def __init__(self, rows, columns, rank):
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, columns) * 0.1)
        self.b = nn.Parameter(torch.randn(rows, rank) * 0.1)

    def forward(self, weight):
        return weight + self.b @ self.a


@pytest.mark.parametrize("kind", ["weight norm", "lora", "batch norm"])
def test_parametrized_weights_are_made_once(kind, tmp_path):
    torch.manual_seed(0)
    if kind == "weight norm":
        model = parametrizations.weight_norm(nn.Linear(6, 5))
    elif kind == "lora":
        model = nn.Linear(6, 5)
        nn.utils.parametrize.register_parametrization(model, "weight", Lora(5, 6, 2))
    else:
        model = nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4)).eval()
        model[1].running_mean.uniform_(-1, 1)
        model[1].running_var.uniform_(0.5, 2)
    x = torch.randn(2, 3, 6) if kind == "batch norm" else torch.randn(3, 6)
    spec = {"input": Tensor(("n", *x.shape[1:]))}
    exported = fx2relax.export(model, {"forward": spec})
    assert set(exported.params) <= set(model.state_dict())
    lifted = exported.lift()
    assert lifted.lifted.lifted
    if kind != "batch norm":
        assert operators(lifted.mod["forward"]).count("matmul") == 1
    for number, chosen in enumerate((exported, lifted)):
        chosen.save(tmp_path / str(number))
        ours = fx2relax.load(tmp_path / str(number), out="torch").forward(x)
        assert torch.allclose(ours, model(x), atol=1e-5)
