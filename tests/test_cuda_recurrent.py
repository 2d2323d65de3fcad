"""Recurrent layers on a GPU: one call where nothing is trained, on the processor as it would be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_cases import needs_gpu
from cuda_models import as_on_gpu, operators
from torch import nn

from fx2relax import recurrent

OPTIONS = {"never_slower": False, "cache": False}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
    "projected": (nn.LSTM, {"proj_size": 3}),
}
ROUTED = "recurrent_layers"
pytestmark = [
    pytest.mark.usefixtures("fresh"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]


class Layers(nn.Module):
    """Recurrent layers between other work, with first states of the caller's or without."""

    def __init__(self, kind: str, **settings: Any) -> None:
        super().__init__()
        cls, extra = KINDS[kind]
        self.inner = cls(6, 5, num_layers=2, **extra, **settings)

    def forward(self, x: torch.Tensor, *states: torch.Tensor) -> Any:
        given = (states if len(states) > 1 else states[0],) if states else ()
        y, last = self.inner(x * 2, *given)
        return y.relu(), last


def states_of(model: Layers, batch: int) -> list[torch.Tensor]:
    inner = model.inner
    lead = inner.num_layers * (2 if inner.bidirectional else 1)
    sizes = [inner.proj_size or inner.hidden_size]
    sizes += [inner.hidden_size] if isinstance(inner, nn.LSTM) else []
    return [torch.randn(lead, batch, size) for size in sizes]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [False, True], ids=["time-first", "batch-first"])
@pytest.mark.parametrize("both", [False, True], ids=["one-way", "both-ways"])
@pytest.mark.parametrize("given", [False, True], ids=["zeros", "states"])
def test_all_layers_are_one_call(
    kind: str, first: bool, both: bool, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "_on_gpu", lambda x: True)
    model = Layers(kind, batch_first=first, bidirectional=both, bias=given).eval()
    x = torch.randn(3, 4, 6)
    states = states_of(model, 3 if first else 4) if given else []
    with as_on_gpu() as graphs, torch.no_grad():
        fast = torch.compile(model, backend="relax", fullgraph=True, options=OPTIONS)
        for batch in (x, x + 1):
            found, expected = fast(batch, *states), model(batch, *states)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            assert found[0].stride() == expected[0].stride()
    assert operators(graphs[0]).count(ROUTED) == 1


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_training_goes_step_by_step(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "_on_gpu", lambda x: True)
    model = Layers("lstm", dropout=dropout).train(dropout > 0)
    x = torch.randn(3, 4, 6)
    with as_on_gpu() as graphs:
        fast = torch.compile(model, backend="relax", fullgraph=True, options=OPTIONS)
        if dropout:
            with torch.no_grad():
                fast(x)
        else:
            torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
    assert all(ROUTED not in operators(graph) for graph in graphs)


@pytest.mark.parametrize("which", [0, 1])
def test_a_first_state_that_alone_learns(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "_on_gpu", lambda x: True)
    model = Layers("lstm").requires_grad_(False)
    x, states = torch.randn(3, 4, 6), states_of(model, 4)
    states[which].requires_grad_()
    with as_on_gpu() as graphs:
        fast = torch.compile(model, backend="relax", fullgraph=True, options=OPTIONS)
        (found,) = torch.autograd.grad(fast(x, *states)[0].sum(), states[which])
    (expected,) = torch.autograd.grad(model(x, *states)[0].sum(), states[which])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert graphs
    assert all(ROUTED not in operators(graph) for graph in graphs)


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_on_a_gpu(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FX2RELAX_CUDA", "1")
    model = Layers(kind, batch_first=True, bidirectional=True).to("cuda", dtype).eval()
    x = torch.randn(3, 4, 6, device="cuda", dtype=dtype)
    with torch.no_grad():
        fast = torch.compile(model, backend="relax", fullgraph=True, options=OPTIONS)
        for batch in (x, x + 1):
            torch.testing.assert_close(fast(batch), model(batch), rtol=1e-2, atol=1e-2)
