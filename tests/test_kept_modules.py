"""Modules that Dynamo has inlined are found again, and kept whole where that is sound."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from kept_backend import Backend, check_compiled, converters, declined
from torch import fx, nn

from fx2relax.kept import keep_whole, kept_call
from fx2relax.same_values import Values, trace


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


@pytest.mark.sweep(6)
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
