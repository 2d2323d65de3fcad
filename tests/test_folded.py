"""What depends on no input is computed once, while a graph is compiled, and by PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fx2relax
from fx2relax.testing import assert_matches_eager

FOLDED: dict[str, tuple[int, Callable[[torch.Tensor], Any]]] = {
    "mask": (
        3,
        lambda x: x.masked_fill(torch.arange(3)[:, None] < torch.arange(3), -1e9),
    ),
    "one of several": (3, lambda x: x + torch.arange(6.0).view(2, 3).unbind()[1]),
    "values and indices": (3, lambda x: x * torch.arange(9.0).view(3, 3).max(0)[0]),
    "complex": (3, lambda x: x * torch.polar(torch.ones(3), torch.arange(3.0))),
    "half": (2, lambda x: x + torch.arange(3, dtype=torch.bfloat16).sqrt()),
    "double": (2, lambda x: x * (torch.arange(3, dtype=torch.float64) / 7)),
    "bool": (1, lambda x: x * torch.eye(3, dtype=torch.bool)),
    "strides": (1, lambda x: x + torch.as_strided(torch.arange(10.0), (3, 3), (1, 2))),
    "written to": (2, lambda x: torch.ones(3, 3).index_fill_(0, torch.arange(2), 5.0) + x),
    "an index of an index": (2, lambda x: x[torch.arange(3)[torch.arange(2)]]),
}
KEPT: dict[str, Callable[[torch.Tensor], Any]] = {
    "a result": lambda x: (x + 1, torch.arange(5)),
    "a result of a constant": lambda x: (x, torch.arange(5) * 2),
    "large": lambda x: x.sum() + torch.full((64, 64), 2.0),
    "nothing": lambda x: torch.cat([x, torch.zeros(0, 3) + 1]),
    "the input's": lambda x: x + torch.arange(x.shape[0]),
}


@pytest.mark.parametrize("name", FOLDED)
def test_constants_are_folded(name: str) -> None:
    least, fn = FOLDED[name]
    x = torch.randn(3, 3)
    for dynamic in (False, True):
        assert_matches_eager(fn, x, dynamic=dynamic)
    (graph,) = fx2relax.explain(fn, x).data.graphs
    folded = [node.name for node in graph.nodes if "computed while" in node.why]
    assert len(folded) >= least
    assert len(graph.kernels) == 1


@pytest.mark.parametrize("name", KEPT)
def test_constants_that_are_not(name: str) -> None:
    for dynamic in (False, True):
        assert_matches_eager(KEPT[name], torch.randn(3, 3), dynamic=dynamic)


def test_results_are_made_anew() -> None:
    fn = torch.compile(lambda x: (x + 1, torch.arange(4)), backend="relax")
    _, first = fn(torch.ones(2))
    first.zero_()
    assert fn(torch.ones(2))[1].tolist() == [0, 1, 2, 3]


def test_an_error_comes_when_it_is_called() -> None:
    fn = torch.compile(lambda x: x + torch.arange(4.0)[torch.tensor([7]).clone()], backend="relax")
    with pytest.raises(IndexError, match="out of"):
        fn(torch.ones(1))


def test_a_converter_of_the_user_is_called() -> None:
    from fx2relax.compat import relax

    def twos(size: Any, **_: Any) -> Any:
        return relax.op.full([4], relax.const(2.0), "float32")

    options = {"call_function_map": {torch.ops.aten.arange.default: twos}}
    fn = torch.compile(
        lambda x: x + torch.arange(4, dtype=torch.float32), backend="relax", options=options
    )
    assert fn(torch.zeros(4)).tolist() == [2.0] * 4
