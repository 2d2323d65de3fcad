"""`from_fx`: every kind of FX graph, and the module structure that comes out."""

import operator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import unconverted  # noqa: F401  registers its operators
from torch import fx, nn

import fx2relax
from fx2relax.compat import op, relax, te, tirx, topi, tvm
from fx2relax.converters.common import te_call
from fx2relax.pipeline import build


def run(mod, *inputs):
    """Run a module in TVM's virtual machine, on TVM's own tensors, weights detached."""
    mod, params = relax.frontend.detach_params(mod)
    machine = relax.VirtualMachine(build(mod, library="none"), tvm.cpu())
    values = [tvm.runtime.tensor(np.ascontiguousarray(x.detach().numpy())) for x in inputs]
    result = machine["main"](*values, *params.get("main", []))
    if isinstance(result, tvm.runtime.Tensor):
        return torch.from_numpy(result.numpy())
    return [torch.from_numpy(r.numpy()) for r in result]


def calls(mod):
    """What the main function calls, in order: operator names and kernel names."""
    found = []
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, relax.Call):
                name = value.op.name if hasattr(value.op, "name") else value.op.name_hint
                kernel = value.args[0].name_hint if name == "relax.call_tir" else None
                found.append(kernel or name)
    return found


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(128, 128))

    def forward(self, x):
        x = torch.matmul(x, self.weight)
        return torch.relu(x)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear0 = nn.Linear(784, 128)
        self.relu = nn.ReLU()
        self.linear1 = nn.Linear(128, 10)

    def forward(self, x):
        return self.linear1(self.relu(self.linear0(x)))


def te_matmul(a, b):
    k = te.reduce_axis((0, a.shape[1]), name="k")
    shape = (a.shape[0], b.shape[1])
    return te.compute(shape, lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="matmul")


def te_relu(a):
    zero = tirx.const(0, "float32")
    return te.compute(a.shape, lambda *i: te.max(a(*i), zero), name="relu")


def test_worked_example_te_functions():
    """Matrix product and ReLU through tensor expressions of the user's own."""
    model = Product()
    mod = fx2relax.from_fx(
        fx.symbolic_trace(model),
        [((1, 128), "float32")],
        call_function_map={
            torch.matmul: lambda a, b: te_call(te_matmul, a, b),
            torch.relu: lambda a: te_call(te_relu, a),
        },
        call_module_map={},
    )
    assert calls(mod) == ["te_matmul", "te_relu"]
    assert sorted(v.name_hint for v in mod.get_global_vars()) == ["main", "te_matmul", "te_relu"]
    assert isinstance(mod["te_relu"], tirx.PrimFunc)
    x = torch.randn(1, 128)
    torch.testing.assert_close(run(mod, x), model(x), rtol=1e-4, atol=1e-4)


def test_worked_example_topi():
    """An MLP through TOPI kernels: dense, add, relu, dense, add."""

    def linear(module, x):
        y = te_call(topi.nn.dense, x, module.weight)
        return te_call(topi.add, y, module.bias)

    model = MLP()
    mod = fx2relax.from_fx(
        fx.symbolic_trace(model),
        [((1, 784), "float32")],
        call_function_map={},
        call_module_map={nn.Linear: linear, nn.ReLU: lambda _, x: te_call(te_relu, x)},
    )
    assert calls(mod) == ["dense", "add", "te_relu", "dense1", "add1"]
    x = torch.randn(1, 784)
    torch.testing.assert_close(run(mod, x), model(x), rtol=1e-4, atol=1e-4)


def test_worked_example_high_level_operators():
    """The same MLP through Relax's own operators, with no kernel yet."""
    model = MLP()
    mod = fx2relax.from_fx(
        fx.symbolic_trace(model),
        [((1, 784), "float32")],
        call_function_map={},
        call_module_map={
            nn.Linear: lambda m, x: op.linear(x, m.weight, m.bias),
            nn.ReLU: lambda _, x: op.nn.relu(x),
        },
    )
    layer = ["relax.permute_dims", "relax.matmul", "relax.add"]
    assert calls(mod) == [*layer, "relax.nn.relu", *layer]
    assert [v.name_hint for v in mod.get_global_vars()] == ["main"]
    x = torch.randn(1, 784)
    torch.testing.assert_close(run(mod, x), model(x), rtol=1e-4, atol=1e-4)


def test_weights_are_named_parameters_behind_num_input():
    model = MLP()
    main = fx2relax.from_fx(fx.symbolic_trace(model), [((1, 784), "float32")])["main"]
    assert int(main.attrs["num_input"]) == 1
    names = [p.name for p in main.params]
    assert names == ["x", "linear0.weight", "linear0.bias", "linear1.weight", "linear1.bias"]
    for tensor, parameter in zip(main.attrs["params"], model.parameters(), strict=True):
        assert tuple(tensor.shape) == tuple(parameter.shape)
        address = torch.utils.dlpack.from_dlpack(tensor).data_ptr()
        assert address == parameter.data_ptr(), "weights share PyTorch's memory"


def test_weights_as_constants():
    model = MLP()
    x = torch.randn(2, 784)
    mod = fx2relax.from_fx(fx.symbolic_trace(model), [x], keep_params_as_input=False)
    assert [p.name for p in mod["main"].params] == ["x"]
    torch.testing.assert_close(run(mod, x), model(x), rtol=1e-4, atol=1e-4)


def test_tied_weights_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    x = torch.randn(2, 4)
    mod = fx2relax.from_fx(fx.symbolic_trace(model), [x])
    names = [p.name for p in mod["main"].params]
    assert len(names) == 4
    assert names.count("0.weight") == 1
    torch.testing.assert_close(run(mod, x), model(x), rtol=1e-5, atol=1e-5)


class Everything(nn.Module):
    """call_module, call_method, get_attr and call_function nodes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.randn(6))
        self.register_buffer("shift", torch.randn(6))

    def forward(self, x):
        y = self.linear(x).view(-1, 2, 3) * self.scale.view(2, 3)
        y = operator.add(y, self.shift.view(2, 3)).transpose(1, 2)
        return F.gelu(y).sum(dim=-1, keepdim=True), y


@pytest.mark.parametrize("how", ["symbolic_trace", "program", "module", "aot"])
def test_kinds_of_graphs(how):
    model, x = Everything().eval(), torch.randn(4, 6)
    if how == "symbolic_trace":
        graph, inputs = fx.symbolic_trace(model), [x]
    elif how == "program":
        graph, inputs = torch.export.export(model, (x,)), None
    elif how == "module":
        graph, inputs = torch.export.export(model, (x,)).module(), [x]
    else:
        graph, inputs = fx.experimental.proxy_tensor.make_fx(model)(x), [x]
    for ours, eager in zip(run(fx2relax.from_fx(graph, inputs), x), model(x), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)


def test_dynamo_graph():
    graphs = []

    def keep(graph, inputs):
        graphs.append((graph, inputs))
        return graph.forward

    x, y = torch.randn(4, 6), torch.randn(6)
    torch.compile(lambda a, b: F.softmax(a * b, dim=-1) + b, backend=keep)(x, y)
    graph, inputs = graphs[0]
    result = run(fx2relax.from_fx(graph, inputs), x, y)
    torch.testing.assert_close(result[0], F.softmax(x * y, dim=-1) + y)


def test_one_name_is_one_size():
    graph = fx.symbolic_trace(lambda x, y: (x + y) * 2)
    mod = fx2relax.from_fx(graph, [(("n", "m"), "float32"), (("n", 1), "float32")])
    first, second = mod["main"].params
    assert first.ty.shape[0].same_as(second.ty.shape[0])
    for n, m in [(2, 3), (5, 4)]:
        x, y = torch.randn(n, m), torch.randn(n, 1)
        torch.testing.assert_close(run(mod, x, y), (x + y) * 2)


def test_two_variables_are_two_sizes():
    n, m = tirx.Var("n", "int64"), tirx.Var("n", "int64")
    graph = fx.symbolic_trace(lambda x, y: (x.sum() + y.sum()).reshape(1))
    mod = fx2relax.from_fx(graph, [((n,), "float32"), ((m,), "float32")])
    assert mod["main"].params[0].ty.shape[0].same_as(n)
    assert mod["main"].params[1].ty.shape[0].same_as(m)
    x, y = torch.randn(3), torch.randn(5)
    torch.testing.assert_close(run(mod, x, y), (x.sum() + y.sum()).reshape(1))


def test_a_fixed_size_that_was_given_as_symbolic_is_an_error():
    graph = fx.symbolic_trace(lambda x: x + torch.ones(4))
    with pytest.raises(fx2relax.Fx2RelaxError, match="n"):
        fx2relax.from_fx(graph, [(("n",), "float32")])


def test_written_buffers_follow_the_outputs():
    model = nn.Sequential(nn.BatchNorm1d(3)).train()
    x = torch.randn(8, 3)
    mod = fx2relax.from_fx(fx.symbolic_trace(model), [x])
    main = mod["main"]
    left = [p.name for p in main.params][: int(main.attrs["num_input"])]
    assert "0.running_mean" in left
    assert "0.weight" not in left
    assert len(main.ret_ty.fields) > 1


def test_missing_operators_are_listed_with_the_remedy():
    op = torch.ops.fx2relax_tests

    def fn(x):
        return op.first(x) + op.second(x) + torch.sin(x)

    graph = fx.symbolic_trace(fn)
    with pytest.raises(fx2relax.UnsupportedOpError, match="2 operators") as caught:
        fx2relax.from_fx(graph, [torch.rand(3)])
    assert [m.name for m in caught.value.missing] == [
        "fx2relax_tests.first.default",
        "fx2relax_tests.second.default",
    ]
    mod = fx2relax.from_fx(graph, [torch.rand(3)], on_unsupported="torch")
    x = torch.rand(3)
    torch.testing.assert_close(run(mod, x), fn(x))


def test_unknown_route_is_refused():
    with pytest.raises(ValueError, match="'raise' or 'torch'"):
        fx2relax.from_fx(fx.symbolic_trace(lambda x: x), [torch.rand(3)], on_unsupported="skip")


def test_inputs_and_weights_among_the_outputs():
    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("c", torch.tensor(3.0))

        def forward(self, x):
            return x, x.t(), self.c

    x = torch.randn(2, 3)
    mod = fx2relax.from_fx(fx.symbolic_trace(Returns()), [x])
    for actual, expected in zip(run(mod, x), Returns()(x), strict=True):
        torch.testing.assert_close(actual, expected)


def test_a_tensor_that_is_returned_twice_is_two_results():
    def twice(x):
        y = x.clone()
        return y.add_(1), y

    x = torch.rand(3)
    first, second = run(fx2relax.from_fx(fx.symbolic_trace(twice), [x]), x)
    torch.testing.assert_close(first, x + 1)
    torch.testing.assert_close(second, x + 1)
