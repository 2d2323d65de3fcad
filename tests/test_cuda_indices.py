"""Indices that are made on the processor, in graphs of tensors on a GPU that is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_cases import ampere, graph_of, needs_gpu
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fx2relax import devices
from fx2relax.errors import BuildFailure
from fx2relax.gpu_indices import make_on_gpu

__all__ = ["ampere"]
pytestmark = pytest.mark.usefixtures("fresh")
Function = Callable[[torch.Tensor], Any]


def lower_half(x: torch.Tensor) -> torch.Tensor:
    i, j = torch.tril_indices(4, 4, -1).unbind()
    return x[i, j] * 2


def written(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.index_put(x, [torch.arange(0, 4, 2) + 1], x[:2])


def traced(function: Function) -> Any:
    """The graph of a function of a tensor on a GPU.

    PyTorch indexes none without CUDA, even where nothing is computed: those are traced on the
    processor, and what depends on the tensor is then said to be on a GPU.
    """
    try:
        return graph_of(function, (4, 4))
    except RuntimeError:
        graph = graph_of(function, (4, 4), device="cpu")
    mode = detect_fake_mode([n.meta["val"] for n in graph.graph.nodes if "val" in n.meta])

    def there(val: torch.Tensor) -> Any:
        with mode:
            return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device="cuda:0")

    reached: set[Any] = set()
    for node in graph.graph.nodes:
        if node.op == "placeholder" or reached & set(node.all_input_nodes):
            reached.add(node)
            if "val" in node.meta:
                node.meta["val"] = pytree.tree_map_only(torch.Tensor, there, node.meta["val"])
    return graph


MOVED = [
    lower_half,
    written,
    lambda x: x[torch.arange(3)],
    lambda x: x[torch.arange(4).flip(0) - 1],
    lambda x: x + torch.arange(4).to(x.device),
    lambda x: x[:, torch.full((2,), 3)],
]


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize("function", MOVED)
def test_indices_are_made_where_tensors_are(function: Function) -> None:
    graph = traced(function)
    with pytest.raises(BuildFailure, match="several devices"):
        devices.of_graph(graph)
    make_on_gpu(graph)
    graph.recompile()
    assert devices.of_graph(graph) == torch.device("cuda:0")
    assert "device(type='cpu')" not in graph.code


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[torch.randint(4, (3,))],
        lambda x: x[torch.arange(3) + torch.linspace(0, 1, 3).long()],
        lambda x: x + torch.linspace(0, 1, 4).to(x.device),
        lambda x: x + torch.tensor(2.0),
    ],
)
def test_what_has_to_be_the_processors_stays(function: Function) -> None:
    graph = traced(function)
    before = graph.code
    make_on_gpu(graph)
    graph.recompile()
    assert graph.code == before


def test_indices_that_are_given_stay() -> None:
    index = torch.ops.aten.index.Tensor
    graph = torch.fx.Graph()
    x, i = graph.placeholder("x"), graph.placeholder("i")
    result = graph.call_function(index, (x, [i]))
    graph.output(result)
    mode = FakeTensorMode()
    with mode:
        x.meta["val"] = result.meta["val"] = torch.empty(4, device="cuda:0")
        i.meta["val"] = torch.empty(4, dtype=torch.int64)
    graph = torch.fx.GraphModule({}, graph)
    before = graph.code
    make_on_gpu(graph)
    graph.recompile()
    assert graph.code == before


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("function", MOVED)
def test_on_a_gpu(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FX2RELAX_CUDA", "1")
    x = torch.randn(4, 4, device="cuda")
    options = {"never_slower": False, "cache": False, "on_unsupported": "raise"}
    fast = torch.compile(function, backend="relax", options=options)
    for _ in range(2):
        torch.testing.assert_close(fast(x), function(x))
