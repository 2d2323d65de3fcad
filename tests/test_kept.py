"""Calls whose own target has a converter stay whole, and compute and differentiate as before."""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from kept_backend import Backend, check_compiled, converters, declined
from torch import fx, nn

from fx2relax import kept_call as kept_call_module
from fx2relax.kept import keep_whole, kept, kept_call
from fx2relax.same_values import trace


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


class Inplace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x * 2, inplace=True)


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
