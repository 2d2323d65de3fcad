"""Calls whose own target has a converter stay whole, and compute and differentiate as before."""

from __future__ import annotations

import gc
import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

from fx2relax import kept_call as kept_call_module
from fx2relax.kept import keep_whole, kept, kept_call
from fx2relax.registry import Converter
from fx2relax.same_values import Values, trace


def converters(*targets: Any) -> dict[Any, Converter]:
    return {target: Converter(target, lambda *a, **k: None) for target in targets}


class Backend:
    """A backend that keeps calls whole and runs the graphs of AOTAutograd in eager."""

    def __init__(self, *targets: Any) -> None:
        self.converters = converters(*targets)
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> Any:
        whole = keep_whole(gm, self.converters)
        return aot_autograd(fw_compiler=self.note, bw_compiler=self.note)(whole, inputs)

    def note(self, graph: fx.GraphModule, inputs: list[Any]) -> Any:
        self.graphs.append(graph)
        return make_boxed_func(graph)

    @property
    def calls(self) -> list[Any]:
        nodes = (n for g in self.graphs for n in g.graph.nodes)
        return [kept(n.args[0]) for n in nodes if n.target is kept_call]


def gradients(function: Any, inputs: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    given = [
        v.detach().clone().requires_grad_(v.is_floating_point())
        if isinstance(v, torch.Tensor)
        else v
        for v in inputs
    ]
    parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
    result = function(*given)
    return result, with_gradients(result, [*given, *parameters])


def with_gradients(result: Any, wanted: list[Any]) -> list[Any]:
    outputs = [v for v in pytree.tree_leaves(result) if isinstance(v, torch.Tensor)]
    total = sum((v * v).sum() for v in outputs if v.requires_grad)
    leaves = [v for v in wanted if isinstance(v, torch.Tensor) and v.requires_grad]
    return list(torch.autograd.grad(total, leaves, allow_unused=True))


def check_compiled(
    function: Any, inputs: tuple[Any, ...], *targets: Any, calls: int, grad: bool, dynamic: bool
) -> Backend:
    torch._dynamo.reset()
    backend = Backend(*targets)
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    if grad:
        want, want_grads = gradients(function, inputs)
        given = [
            v.detach().clone().requires_grad_(v.is_floating_point())
            if isinstance(v, torch.Tensor)
            else v
            for v in inputs
        ]
        parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
        got = compiled(*given)
        torch.testing.assert_close(with_gradients(got, [*given, *parameters]), want_grads)
    else:
        with torch.no_grad():
            want, got = function(*inputs), compiled(*inputs)
    torch.testing.assert_close(got, want)
    assert len(backend.calls) == calls
    return backend


def attention(q: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q.relu(), q * 2, is_causal=True) + 1


FUNCTIONS: list[tuple[str, Callable[..., Any], Any, int]] = [
    ("function", lambda x: torch.relu(x) + 1, torch.relu, 1),
    ("not another spelling", lambda x: F.relu(x) + x.relu(), torch.relu, 0),
    ("alias", lambda x: F.linear(x, x), torch._C._nn.linear, 1),
    ("method", lambda x: x.softmax(-1) * 2, "softmax", 1),
    ("method descriptor", lambda x: x.softmax(-1) * 2, torch.Tensor.softmax, 1),
    ("operator", lambda x: x + x, operator.add, 1),
    ("keywords", attention, F.scaled_dot_product_attention, 1),
    ("tuple result", lambda x: torch.topk(x, 2)[0] + 1, torch.topk, 1),
    ("list argument", lambda x: torch.cat([x, x * 2], dim=0), torch.cat, 1),
    ("view result", lambda x: torch.flatten(x) * 2, torch.flatten, 1),
    ("unneeded gradient", lambda x: torch.where(x > 0, x, x.detach()), torch.where, 1),
    ("twice", lambda x: torch.sin(torch.sin(x)), torch.sin, 2),
]


@pytest.mark.parametrize(("grad", "dynamic"), [(False, False), (True, True)])
@pytest.mark.parametrize(("name", "function", "target", "calls"), FUNCTIONS)
def test_function(
    name: str, function: Any, target: Any, calls: int, grad: bool, dynamic: bool
) -> None:
    shape = (2, 5, 4) if target is F.scaled_dot_product_attention else (3, 4)
    check_compiled(function, (torch.randn(shape),), target, calls=calls, grad=grad, dynamic=dynamic)


class Shared(nn.Module):
    """Modules called twice, tied, without gradients, with several inputs and results."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.tied = self.first
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(self.first(x))
        y = self.tied(y) + self.first(y)
        with torch.no_grad():
            z = self.first(y)
        return self.attention(y, z, z, need_weights=False)[0], y.shape[0]


@pytest.mark.parametrize(("grad", "dynamic"), [(False, False), (True, True)])
@pytest.mark.parametrize(
    ("targets", "calls"),
    [
        ((nn.Linear,), 4),
        ((nn.LayerNorm,), 1),
        ((nn.MultiheadAttention,), 1),
        ((nn.Linear, nn.LayerNorm, nn.MultiheadAttention), 6),
        ((nn.Module,), 0),
    ],
)
def test_inlined_module(targets: Any, calls: int, grad: bool, dynamic: bool) -> None:
    check_compiled(
        Shared(), (torch.randn(2, 3, 4),), *targets, calls=calls, grad=grad, dynamic=dynamic
    )


def test_the_compiled_module_itself() -> None:
    backend = check_compiled(
        nn.Linear(4, 3), (torch.randn(2, 4),), nn.Linear, calls=1, grad=True, dynamic=False
    )
    assert backend.calls[0].weights == ("weight", "bias")


@pytest.mark.parametrize("grad", [False, True])
def test_recurrent_module(grad: bool) -> None:
    inputs = (torch.randn(2, 6, 4), (torch.randn(1, 2, 5), torch.randn(1, 2, 5)))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 5, batch_first=True)

        def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Any:
            out, (last, cell) = self.lstm(x, (h, c))
            return out.relu(), last, cell

    flat = (inputs[0], *inputs[1])
    with torch._dynamo.config.patch(allow_rnn=True):
        check_compiled(Network(), flat, nn.LSTM, calls=1, grad=grad, dynamic=False)


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * self.scale + factor


class UsesScaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = Scaled(2.0)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.scaled(y, x)


def test_arguments_are_proved_not_guessed() -> None:
    """The order of first use in the graph is not the order of the arguments."""

    class Backwards(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return b.exp() - a

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Backwards()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.part(x, y)

    inputs = (torch.randn(3), torch.randn(3))
    backend = check_compiled(Network(), inputs, Backwards, calls=1, grad=False, dynamic=False)
    call = backend.calls[0]
    graph = backend.graphs[0].graph
    names = [n.name for n in graph.nodes if n.op == "placeholder"]
    node = next(n for n in graph.nodes if n.target is kept_call)
    (_, first, second), _ = call.bind([n.name for n in node.args[1:]])
    # Dynamo's placeholders stand in the order of first use: y, then x.
    assert [names.index(first), names.index(second)] == [1, 0]


def test_a_number_of_the_module_is_guarded() -> None:
    """A converter reads ``module.scale``: another value has to compile again."""
    torch._dynamo.reset()
    backend = Backend(Scaled)
    network = UsesScaled()
    compiled = torch.compile(network, backend=backend, fullgraph=True, dynamic=True)
    inputs = (torch.randn(3), torch.randn(3))
    for scale in (2.0, 3.0, 5.0):
        network.scaled.scale = scale
        torch.testing.assert_close(compiled(*inputs), network(*inputs))
    assert len(backend.calls) == len(backend.graphs) == 3


def declined(reason: str) -> Any:
    return pytest.warns(UserWarning, match=f"(?s)not kept whole.*{reason}")


class Inplace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x * 2, inplace=True)


def test_training_statistics_are_left_to_pytorch() -> None:
    network = nn.Sequential(nn.BatchNorm1d(4)).train()
    twin = nn.Sequential(nn.BatchNorm1d(4)).train()
    x = torch.randn(6, 4)
    torch._dynamo.reset()
    backend = Backend(nn.BatchNorm1d)
    with declined("in place"):
        got = torch.compile(network, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(got, twin(x))
    torch.testing.assert_close(network.state_dict(), twin.state_dict())
    assert not backend.calls


@pytest.mark.parametrize(
    ("function", "target", "reason"),
    [
        (Inplace(), F.relu, "writes to its arguments"),
        (lambda x: F.dropout(x * 2, 0.5), F.dropout, "random"),
        (
            lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4), training=True),
            F.batch_norm,
            "writes",
        ),
        (lambda x: (x * 2).view(-1).add_(1), "view", "returns a view"),
    ],
)
def test_declined_function(function: Any, target: Any, reason: str) -> None:
    torch._dynamo.reset()
    backend = Backend(target)
    x = torch.randn(3, 4)
    with declined(reason):
        torch.manual_seed(0)
        got = torch.compile(function, backend=backend, fullgraph=True)(x.clone().requires_grad_())
    torch.manual_seed(0)
    torch.testing.assert_close(got, function(x.clone().requires_grad_()))
    assert not backend.calls


def test_random_function_is_kept_without_gradients() -> None:
    check_compiled(
        lambda x: F.dropout(x, 0.0) * 2,
        (torch.randn(3, 4),),
        F.dropout,
        calls=1,
        grad=False,
        dynamic=False,
    )


def test_altered_modules_are_declined() -> None:
    class Twice(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    class Inherits(nn.Linear):
        pass

    x = torch.randn(2, 4)
    plain = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4)))
    assert keep_whole(plain, converters(nn.Linear)) is not plain
    for module in (Twice(4, 4), Inherits(4, 4)):
        root = nn.Sequential(module)
        graph = fx.Graph()
        graph.output(graph.call_module("0", (graph.placeholder("x"),)))
        gm = fx.GraphModule(root, graph)
        whole = keep_whole(gm, converters(nn.Linear))
        assert (whole is gm) == isinstance(module, Twice)
        torch.testing.assert_close(whole(x), root(x))
    hooked = nn.Sequential(nn.Linear(4, 4))
    hooked[0].register_forward_hook(lambda module, args, result: result + 1)
    gm = fx.symbolic_trace(hooked)
    with declined("hooks"):
        assert keep_whole(gm, converters(nn.Linear)) is gm


def test_nothing_to_keep_is_the_same_graph() -> None:
    gm = fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    assert keep_whole(gm, {}) is gm
    assert keep_whole(gm, converters(nn.Linear, torch.sin)) is gm
    assert keep_whole(gm, converters(torch.ops.aten.relu.default)) is gm


def test_bind_gives_the_call_back() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)
            self.parts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, bias=False)])
            self.register_buffer("shift", torch.ones(1))
            self.factor = 3

        def forward(self, x: torch.Tensor, *, flip: bool = False) -> torch.Tensor:
            return self.conv(x) * self.factor + self.shift

    root = nn.Sequential(Block())
    graph = fx.Graph()
    graph.output(graph.call_module("0", (graph.placeholder("x"),), {"flip": True}))
    gm = keep_whole(fx.GraphModule(root, graph), converters(Block))
    traced = trace(gm, [torch.randn(1, 3, 4, 4)])
    node = next(n for n in traced.graph.nodes if n.target is kept_call)
    call = kept(node.args[0])
    values = [f"v{i}" for i in range(len(node.args) - 1)]
    (view, x), kwargs = call.bind(values)
    named = dict(zip(call.weights, values, strict=False))
    assert kwargs == {"flip": True}
    assert x == values[-1]
    assert view.conv.weight == named["conv.weight"]
    assert view.parts[1].weight == named["parts.1.weight"]
    assert [part.weight for part in view.parts] == [
        named["parts.0.weight"],
        named["parts.1.weight"],
    ]
    assert view.parts[-1].bias is None
    assert view.shift == named["shift"]
    assert (view.factor, view.conv.padding) == (3, (1, 1))
    assert isinstance(view, Block)
    assert isinstance(view.conv, nn.Conv2d)
    assert dict(view.named_parameters())["conv.bias"] == named["conv.bias"]
    with pytest.raises(AttributeError):
        _ = view.nothing


def test_results_of_a_converter_are_flattened_in_order() -> None:
    gm = keep_whole(fx.symbolic_trace(nn.Sequential(nn.LSTM(3, 4))), converters(nn.LSTM))
    traced = trace(gm, [torch.randn(5, 2, 3)])
    call = kept(next(n for n in traced.graph.nodes if n.target is kept_call).args[0])
    assert call.flatten(("out", ("h", "c"))) == ["out", "h", "c"]
    assert call.out_spec == pytree.tree_structure((0, (0, 0)))


def test_calls_die_with_their_graphs() -> None:
    gc.collect()
    before = len(kept_call_module._live)
    gm = keep_whole(fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4))), converters(nn.Linear))
    traced = trace(gm, [torch.randn(2, 4)])
    assert len(kept_call_module._live) == before + 1
    x = torch.randn(3, 4)
    torch.testing.assert_close(traced(x), gm(x))
    token = int(next(n for n in traced.graph.nodes if n.target is kept_call).args[0])
    del traced, gm
    gc.collect()
    assert len(kept_call_module._live) == before
    with pytest.raises(KeyError):
        kept(token)


def test_autocast_is_the_same_in_the_backward() -> None:
    class Network(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return F.linear(x, x).float()

    check_compiled(Network(), (torch.randn(3, 4),), F.linear, calls=1, grad=True, dynamic=False)


def test_second_derivative_in_eager() -> None:
    gm = keep_whole(fx.symbolic_trace(lambda x: torch.sin(x) * x), converters(torch.sin))
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(gm, (x,))


def test_value_numbers_tell_graphs_apart() -> None:
    def numbers(values: Values, function: Any) -> Any:
        return values.number(trace(function, [torch.randn(2), torch.randn(2)]))

    values = Values(2)
    same = numbers(values, lambda x, y: [x + y, x * 2])
    assert numbers(values, lambda x, y: [x * 2, y, x + y])[::2] == same[::-1]
    assert numbers(values, lambda x, y: [y + x])[0] != same[0]
    assert numbers(values, lambda x, y: [x * 3])[0] != same[1]
    assert numbers(values, lambda x, y: [x.add_(y)]) is None
    draws = numbers(values, lambda x, y: [torch.rand_like(x), torch.rand_like(x)])
    assert draws[0] != draws[1]


def test_no_warning_where_all_is_kept() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_compiled(
            Shared(), (torch.randn(2, 3, 4),), nn.Linear, calls=4, grad=True, dynamic=False
        )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


def test_a_module_that_is_not_in_the_graph() -> None:
    """`fx.symbolic_trace` and `torch.export` write what a module did and forget the module."""
    network = nn.Sequential(Block())
    traced = fx.symbolic_trace(network)
    with declined("make it a leaf when tracing"):
        assert keep_whole(traced, converters(Block)) is traced
    program = torch.export.export(network, (torch.randn(2, 4),)).module()
    with declined("is not in the graph"):
        assert keep_whole(program, converters(nn.Linear)) is program


def test_a_resolver_finds_the_modules_of_an_exported_program() -> None:
    network = nn.Sequential(Block())
    x = torch.randn(2, 4)
    program = torch.export.export(network, (x,)).module()
    asked = []

    def resolve(path: str, cls: type) -> nn.Module:
        asked.append((path, cls))
        return network[0].fc

    whole = keep_whole(program, converters(nn.Linear), resolve)
    assert [cls for _, cls in asked] == [nn.Linear]
    torch.testing.assert_close(whole(x), network(x))
    traced = trace(whole, [x])
    assert [n.target is kept_call for n in traced.graph.nodes].count(True) == 1
