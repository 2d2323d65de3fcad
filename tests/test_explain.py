"""What `explain` says of models: each node has a way, a line, a kernel, each kernel its time."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fx2relax
from fx2relax.explaining.report import Line
from fx2relax.explaining.text import leading_lines, more_lines

pytestmark = pytest.mark.usefixtures("fresh")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.wide(self.norm(x)))
        return x + self.narrow(hidden)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(32), Block(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).softmax(-1)


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 32, 3, padding=1)
        self.bn = nn.BatchNorm2d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn(self.conv(x)))
        return F.max_pool2d(y, 2).mean((2, 3))


class Words(nn.Module):
    """Embeddings whose weight is that of the last product, and a result that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(60, 32), nn.Embedding(20, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.arange(x.shape[1])
        hidden = self.words(x) + self.places(places)
        hidden = hidden + torch.tanh(F.linear(hidden, self.places.weight)) @ self.places.weight
        return F.linear(self.norm(hidden), self.words.weight), places


MODELS = {
    "words": (Words, (torch.randint(0, 60, (2, 9)),)),
    "encoder": (Encoder, (torch.randn(2, 24, 32),)),
    "pictures": (Pictures, (torch.randn(2, 16, 20, 20),)),
}


def _source(text: str) -> int:
    """The number of a line of this file, by a part of it."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(n for n, line in enumerate(lines, 1) if text in line)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("library", ["torch", "none"])
@pytest.mark.parametrize("name", MODELS)
def test_every_node_has_a_line_a_way_and_a_kernel(name: str, library: str, grad: bool) -> None:
    build, inputs = MODELS[name]
    report = fx2relax.explain(build().train(grad), *inputs, grad=grad, options={"library": library})
    phases = [graph.phase for graph in report.data.graphs]
    assert phases == (["forward", "backward"] if grad else ["inference"])
    for graph in report.data.graphs:
        assert graph.nodes
        assert graph.kernels
        for node in graph.nodes:
            assert node.line.file == __file__, node
            assert node.how in ("generated", "library", "weights", "nothing"), node
            assert bool(node.kernels) == (node.how in ("generated", "library")), node
        assert not [kernel for kernel in graph.kernels if not kernel.nodes]
        for kernel in graph.kernels:
            for node_name in kernel.nodes:
                (node,) = [n for n in graph.nodes if n.name == node_name]
                assert kernel.number in node.kernels
    ways = {k.how for k in report.data.kernels}
    assert ways == ({"generated", "library"} if library == "torch" else {"generated"})


BARE: dict[str, tuple[Callable[[], Any], tuple[torch.Tensor, ...]]] = {
    "modules": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1)),
        (torch.randn(3, 4),),
    ),
    "one module": (lambda: nn.Linear(4, 4), (torch.randn(3, 4),)),
    "a layer of PyTorch's": (lambda: nn.TransformerEncoderLayer(8, 2), (torch.randn(2, 3, 8),)),
    "a function": (lambda: torch.erfc, (torch.randn(3, 4, requires_grad=True),)),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", BARE)
def test_what_only_pytorch_calls_has_lines_too(name: str, grad: bool) -> None:
    build, inputs = BARE[name]
    model = build()
    report = fx2relax.explain(model, *inputs, grad=grad, options={"library": "torch"})
    nodes = [node for graph in report.data.graphs for node in graph.nodes]
    assert nodes
    for node in nodes:
        assert Path(node.line.file).is_file(), node
        assert node.line.number, node
        assert node.line.code, node
    assert "(no line)" not in str(report)
    lines = {str(node.line.code) for node in nodes}
    if name == "modules":
        assert lines >= {"0: Linear", "1: BatchNorm1d", "2: ReLU"}
    elif name == "a function":
        assert lines == {
            'report = fx2relax.explain(model, *inputs, grad=grad, options={"library": "torch"})'
        }


def test_a_line_leads_to_its_kernels() -> None:
    model = Encoder().eval()
    graph = fx2relax.explain(
        model, torch.randn(2, 24, 32), options={"library": "torch"}
    ).data.graphs[0]
    line = _source("hidden = F.gelu(self.wide(self.norm(x)))")
    own = [node for node in graph.nodes if node.line.number == line]
    assert {"aten.gelu.default", "aten.addmm.default", "aten.native_layer_norm.default"} <= {
        node.op for node in own
    }
    assert all(node.line.code == "hidden = F.gelu(self.wide(self.norm(x)))" for node in own)
    products = [n for n in graph.nodes if n.op == "aten.addmm.default"]
    assert [n.how for n in products] == ["library"] * 4
    assert [n.layer for n in products] == [
        f"blocks.{i}.{name}" for i in range(2) for name in ("wide", "narrow")
    ]
    assert products[0].operations == 2 * 48 * 32 * 128
    assert "matmul" in products[0].relax
    kernels = [graph.kernels[n.kernels[0]] for n in products]
    assert all("matmul" in k.name or "rows" in k.name for k in kernels)
    gelu = next(n for n in graph.nodes if n.op == "aten.gelu.default")
    assert "gelu" in graph.kernels[gelu.kernels[0]].name


def test_batch_norm_is_part_of_its_convolution() -> None:
    report = fx2relax.explain(
        Pictures().eval(), torch.randn(2, 16, 20, 20), options={"library": "torch"}
    )
    (graph,) = report.data.graphs
    ops = {node.op.split(".")[1]: node for node in graph.nodes}
    norm, conv = ops["_native_batch_norm_legit_no_training"], ops["convolution"]
    assert set(norm.kernels) & set(conv.kernels)
    assert graph.weights.count == 6
    assert graph.weights.made
    expected = sum(t.numel() * 4 for n, t in Pictures().state_dict().items() if "tracked" not in n)
    assert graph.weights.bytes == pytest.approx(expected, abs=8)


class Odd(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        draws = torch.rand_like(x)
        print("a graph break")
        return (x + draws).erfinv() * 2


def test_what_runs_in_pytorch_and_where_graphs_break(capsys: pytest.CaptureFixture[str]) -> None:
    report = fx2relax.explain(Odd(), torch.randn(5))
    nodes = [node for graph in report.data.graphs for node in graph.nodes]
    (draw,) = [node for node in nodes if node.how == "torch"]
    assert draw.op.startswith("aten.rand")
    assert draw.line.number == _source("draws = torch.rand_like(x)")
    assert draw.why
    (cut,) = report.data.breaks
    assert cut.line.number == _source('print("a graph break")')
    assert "print" in cut.reason
    text = str(report)
    assert "graph break at test_explain.py" in text
    assert "operators in PyTorch" in text


def test_measured_times_add_up() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(6)]).eval()
    report = fx2relax.explain(model, torch.randn(256, 512))
    assert report.data.call is None
    assert report.measure(0.5) is report
    data = report.data
    assert data.call is not None
    assert data.outside is not None
    assert [k for k in data.kernels if not k.seconds] == []
    inside = sum(kernel.seconds or 0.0 for kernel in data.kernels)
    assert 0.5 * data.call < inside <= data.call * (1 + 1e-9)
    lines = sum(spent for _, spent, _ in data.by_line())
    layers = sum(spent for _, spent, _ in data.by_layer())
    assert math.isclose(lines, inside, rel_tol=1e-6)
    assert math.isclose(layers, inside, rel_tol=1e-6)
    assert data.limits is not None
    assert data.limits.bytes > 1e8
    assert data.limits.operations > 1e8
    with torch.no_grad():  # what was measured still runs
        torch.testing.assert_close(
            torch.compile(model, backend="relax")(torch.ones(2, 512)), model(torch.ones(2, 512))
        )


class Cache(nn.Module):
    """It leaves a trace, so that its programs take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.ask = nn.Linear(64, 64)
        self.register_buffer("keys", torch.zeros(1, 128, 64))

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        asked = self.ask(x)
        self.keys[:, place] = asked[:, 0]
        return F.scaled_dot_product_attention(asked, self.keys, self.keys)


SMALL: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...], bool]] = {
    "layers": (lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU()), (torch.randn(8, 64),), False),
    "a step": (lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU()), (torch.randn(8, 64),), True),
    "a cache": (Cache, (torch.randn(1, 1, 64), torch.tensor([3])), False),
    "one kernel": (lambda: nn.Softmax(-1), (torch.randn(8, 64),), False),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_graphs_are_accounted_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FX2RELAX_NEVER_SLOWER", "1")
    build, inputs, grad = SMALL[name]
    report = fx2relax.explain(build().train(grad), *inputs, grad=grad).measure(0.2)
    data = report.data
    assert data.call is not None
    for graph in data.graphs:
        assert graph.kernels
        assert sum(kernel.seconds or 0.0 for kernel in graph.kernels) > 0, graph.name
    rest = data.overheads()
    assert len(rest) == 2
    lines = [spent for _, spent, _ in data.by_line()]
    assert sum([*lines, *(spent for _, spent in rest)]) == pytest.approx(data.call, rel=1e-6)
    for name, _ in rest:
        assert name.split(",")[0] in str(report)
        assert name.split(",")[0] in report.to_html()


def test_lines_that_take_no_time_come_last() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(64, 8)
        x = x.T
        x = x.exp()
        return x.unsqueeze(0)

    report = fx2relax.explain(function, torch.randn(8, 64), options={"library": "none"})
    assert "more line" not in str(report)
    page = report.measure(0.1).to_html()
    idle = sum(not spent for _, spent, _ in report.data.by_line())
    assert idle in (1, 2, 3), "views may be part of the kernel"
    said = more_lines(report.data.by_line()[-idle:], report.data)
    assert said.endswith(", no kernel's time")
    assert said in page
    assert said in " ".join(str(report).split())
    places = [page.index(part) for part in ("x.exp()", "around the graphs: ", "x.unsqueeze(0)")]
    assert places == sorted(places)
    assert "1 kernel<" in page
    for kernel in report.data.kernels:
        kernel.seconds = 0.0
    first, rest = leading_lines(report.data, 30)
    assert (len(first), len(rest)) == (0, 4)
    assert more_lines([(Line(), 1e-3, []), (Line(), 1e-3, [])], report.data) == (
        "2 more lines, 2 ms together"
    )


def test_watching_leaves_nothing_behind() -> None:
    from fx2relax.explaining.recorder import Recorder

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    report = fx2relax.explain(model, torch.randn(8, 64), options={"library": "none"})
    recorder: Recorder = report._recorder
    (notes,) = recorder.graphs
    variant = notes.chosen
    assert variant is not None
    told: list[str] = []
    with variant.program.watched(lambda function, symbol, *rest: told.append(symbol) or 0):
        report._call()
    seen = len(told)
    report._call()
    assert (bool(seen), len(told)) == (True, seen)


def test_a_graph_of_one_kernel_is_measured_too() -> None:
    report = fx2relax.explain(lambda x: x + 1, torch.randn(1000)).measure(0.2)
    (kernel,) = report.data.kernels
    assert kernel.seconds
    assert kernel.bytes == 8000


def test_symbolic_sizes() -> None:
    report = fx2relax.explain(Encoder().eval(), torch.randn(3, 24, 32), dynamic=True).measure(0.2)
    (graph,) = report.data.graphs
    assert [k for k in graph.kernels if not k.seconds] == []
    assert all(node.line.file == __file__ for node in graph.nodes)


def test_a_function_whose_weights_are_not_known_is_refused() -> None:
    net = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match="give a module"):
        fx2relax.explain(lambda x: net(x).cos(), torch.randn(2, 4), grad=True)


def test_gradients_and_the_model_are_left_alone() -> None:
    model = Encoder()
    x = torch.randn(2, 24, 32, requires_grad=True)
    fx2relax.explain(model, x, grad=True)
    assert x.grad is None
    assert all(w.grad is None for w in model.parameters())


def test_either_branch_of_a_choice() -> None:
    """The kernels of both are shown; those of the one that runs take time."""

    def chosen(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() * 2
        z = torch.cond(y.sum() > 0, lambda v: (v @ v).relu(), lambda v: v.exp() - v, (y,))
        return z + x

    report = fx2relax.explain(chosen, torch.rand(24, 24) + 0.1, options={"never_slower": False})
    (graph,) = report.data.graphs
    node = next(n for n in graph.nodes if n.op.endswith("cond"))
    own = [k for k in graph.kernels if k.nodes == [node.name]]
    assert node.how in ("library", "generated")
    assert len(own) >= 2
    assert node.line.code.startswith("z = torch.cond(")
    assert "cond" in str(report)
    report.measure(0.05)
    taken = [kernel.seconds for kernel in own]
    assert any(taken)
    assert not all(taken), "the other branch did not run"
