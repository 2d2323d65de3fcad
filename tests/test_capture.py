"""Any FX graph becomes a functional ATen graph that computes what the graph computes."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captured import run, targets
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

from fx2relax.capture import Captured, capture


def kinds(captured: Captured) -> dict[str, str]:
    return {i.name: i.kind for i in captured.inputs}


class Net(nn.Module):
    """Normalisation, an in-place activation, dropout, a literal and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 2)
        self.register_buffer("shift", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.norm(self.conv(x)))
        y = self.drop(y.mean((2, 3)))
        return (self.head(y) + self.shift) * torch.tensor([1.0, 2.0])


def sources(model: nn.Module, *inputs: Any) -> dict[str, Any]:
    program = torch.export.export(model, inputs)
    return {
        "trace": fx.symbolic_trace(model),
        "program": program,
        "module": program.module(),
    }


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("source", ["trace", "program", "module"])
def test_network(source: str, training: bool) -> None:
    model = Net().train(training)
    x = torch.randn(2, 3, 6, 6)
    captured = capture(sources(model, x)[source], [((2, 3, 6, 6), "float32")])
    twin = copy.deepcopy(model)
    torch.manual_seed(0)
    want = twin(x)
    torch.manual_seed(0)
    got, new = run(captured, x)
    torch.testing.assert_close(got, want)
    statistics = [f"norm.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")]
    assert sorted(new) == (sorted(statistics) if training else [])
    for name, value in new.items():
        torch.testing.assert_close(value, twin.state_dict()[name])
    names = [i.name for i in captured.inputs]
    state = [n for n in model.state_dict() if training or n != "norm.num_batches_tracked"]
    if source != "trace":  # symbolic_trace orders a model's weights by their first use
        assert names == ["x", *state, "constant_0"]
    assert sorted(names) == sorted(["x", *state, "constant_0"])
    assert names[-1] == "constant_0"
    for described in captured.inputs:
        if described.name in model.state_dict():
            value = dict(model.named_parameters()).get(described.name)
            assert described.kind == ("buffer" if value is None else "parameter")
            assert described.value.data_ptr() == model.state_dict()[described.name].data_ptr()
        assert described.mutated == (described.name in new)


def test_names_come_from_the_graph() -> None:
    captured = capture(fx.symbolic_trace(Net().eval()), [((2, 3, 6, 6), "float32")])
    names = {n.name for n in captured.graph.nodes}
    assert {"x", "conv_weight", "norm_running_mean", "shift", "conv", "act", "mean"} <= names
    node = next(n for n in captured.graph.nodes if n.name == "conv")
    assert node.target is torch.ops.aten.convolution.default
    assert next(iter(node.meta["nn_module_stack"].values()))[0] == "conv"
    renamed = capture(fx.symbolic_trace(Net().eval()), [((2, 3, 6, 6), "float32")], names=["image"])
    assert renamed.inputs[0].name == next(iter(renamed.graph.nodes)).name == "image"


def test_stack_traces_survive() -> None:
    program = torch.export.export(Net().eval(), (torch.randn(2, 3, 6, 6),))
    captured = capture(program)
    node = next(n for n in captured.graph.nodes if n.target is torch.ops.aten.mean.dim)
    assert "y.mean((2, 3))" in node.meta["stack_trace"]


def test_weights_are_what_the_graph_uses_tied_ones_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(3, 3)
            self.a = nn.Linear(3, 3)
            self.b = nn.Linear(3, 3)
            self.b.weight = self.a.weight
            self.register_buffer("plus", torch.ones(3), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x)) + self.plus

    model = Tied()
    x = torch.randn(2, 3)
    for source in sources(model, x).values():
        captured = capture(source, [x])
        torch.testing.assert_close(run(captured, x)[0], model(x))
        assert kinds(captured) == {
            "x": "user",
            "a.weight": "parameter",
            "a.bias": "parameter",
            "b.bias": "parameter",
            "plus": "buffer",
        }


def test_dynamo_and_aot_graphs() -> None:
    seen: list[fx.GraphModule] = []

    def note(gm: fx.GraphModule, inputs: Any) -> Any:
        seen.append(gm)
        return gm

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) @ x.T + x.shape[0]

    x = torch.randn(3, 4)
    with torch.no_grad():
        for backend in (note, aot_autograd(fw_compiler=note)):
            torch._dynamo.reset()
            torch.compile(function, backend=backend, dynamic=True)(x)
    dynamo, aot = seen
    for gm in (dynamo, aot):
        captured = capture(gm)
        sizes = [i for i in captured.inputs if isinstance(i.val, torch.SymInt)]
        y = torch.randn(5, 4)
        given = [y.shape[0], y.shape[1]][: len(sizes)]
        torch.testing.assert_close(run(captured, *given, y)[0][0], function(y))


def test_decompositions_are_the_callers() -> None:
    gm = fx.symbolic_trace(lambda x: F.gelu(x))
    assert targets(capture(gm, [((3,), "float32")])) == [torch.ops.aten.gelu.default]
    rule = {torch.ops.aten.gelu.default: lambda x, approximate="none": torch.sigmoid(x)}
    captured = capture(gm, [((3,), "float32")], decompositions=rule)
    assert targets(captured) == [torch.ops.aten.sigmoid.default]


def test_recurrent_network_is_left_as_it_was() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 5, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> Any:
            out, (h, _) = self.lstm(x)
            return out, h

    model = Network()
    x = torch.randn(2, 6, 4)
    captured = capture(fx.symbolic_trace(model), [(("batch", 6, 4), "float32")])
    torch.testing.assert_close(run(captured, x)[0], model(x))
    flat = model.lstm._flat_weights
    assert all(a is b for a, b in zip(flat, model.lstm.parameters(), strict=True))


def test_literals_become_constants_once() -> None:
    class Literals(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            table = torch.tensor([1.0, 2.0, 3.0])
            return x + table * table

    x = torch.randn(3)
    for source in sources(Literals(), x).values():
        captured = capture(source, [x])
        torch.testing.assert_close(run(captured, x)[0], Literals()(x))
        assert kinds(captured) == {"x": "user", "constant_0": "constant"}


def test_random_draws_keep_their_sequence() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch.rand_like(x)
        return x + torch.rand_like(x)

    x = torch.randn(4)
    captured = capture(torch.export.export(Wrap(function), (x,)))
    torch.manual_seed(1)
    want = function(x)
    torch.manual_seed(1)
    torch.testing.assert_close(run(captured, x)[0], want)


class Wrap(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def test_transformers() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what transformers warns about on import
        from transformers import BertConfig, BertModel

    config = BertConfig(
        num_hidden_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=100,
    )
    model = BertModel(config).eval()
    ids = torch.randint(0, 100, (2, 7))
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=512)
    with torch.no_grad():
        program = torch.export.export(model, (ids,), dynamic_shapes=({0: batch, 1: length},))
        captured = capture(program)
        more = torch.randint(0, 100, (3, 9))
        torch.testing.assert_close(run(captured, more)[0][0], model(more)[0])
    names = [i.name for i in captured.inputs if i.kind == "parameter"]
    assert names == [n for n in model.state_dict() if n in names]
    assert "embeddings.word_embeddings.weight" in names
