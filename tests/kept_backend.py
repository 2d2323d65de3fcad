"""A backend that keeps calls whole and runs everything in eager, to compare with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

from fx2relax.kept import keep_whole, kept, kept_call
from fx2relax.registry import Converter


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


def declined(reason: str) -> Any:
    return pytest.warns(UserWarning, match=f"(?s)not kept whole.*{reason}")
