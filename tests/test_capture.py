"""Any FX graph becomes a functional ATen graph that computes what the graph computes."""

from __future__ import annotations

import copy
import operator
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

from fx2relax.capture import Captured, capture
from fx2relax.compat import tirx
from fx2relax.errors import ImportFailure
from fx2relax.kept import kept, kept_call
from fx2relax.registry import Converter


def run(captured: Captured, *inputs: Any) -> tuple[Any, dict[str, Any]]:
    """Run a captured graph in eager: what the user's graph returns, and new values by name."""
    for node in captured.graph.nodes:
        assert node.op in ("placeholder", "call_function", "output")
        assert node.op == "output" or "val" in node.meta, node
        if isinstance(node.target, torch._ops.OpOverload):
            assert not node.target._schema.is_mutable, node
    given = iter(v for v in pytree.tree_leaves(inputs) if isinstance(v, torch.Tensor))
    sizes = iter(v for v in pytree.tree_leaves(inputs) if isinstance(v, int))
    arguments = []
    for described in captured.inputs:
        if described.kind != "user":
            arguments.append(described.value)
        else:
            arguments.append(next(given if isinstance(described.val, torch.Tensor) else sizes))
    with torch.no_grad():
        flat = fx.Interpreter(captured.gm).run(*arguments)
    users = captured.num_outputs
    new = [captured.inputs[i].name for i in captured.mutations]
    return captured.unflatten(flat[:users]), dict(zip(new, flat[users:], strict=True))


def kinds(captured: Captured) -> dict[str, str]:
    return {i.name: i.kind for i in captured.inputs}


def targets(captured: Captured) -> list[Any]:
    return [n.target for n in captured.graph.nodes if n.op == "call_function"]


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


class Structured(nn.Module):
    """Nested inputs and outputs, a written input, constants among the outputs."""

    def forward(self, x: torch.Tensor, parts: dict[str, Any], scale: float = 2.0) -> Any:
        x.add_(1)
        x[0].mul_(scale)
        return {"sum": x + parts["k"], "none": None, "n": x.shape[0]}, [parts["m"], 3, x]


def test_structures_and_written_inputs() -> None:
    x, parts = torch.randn(2, 3), {"k": torch.randn(3), "m": torch.randn(4)}
    specs = [((2, 3), "float32"), {"k": ((3,), torch.float32), "m": ((4,), "float32")}]
    program = torch.export.export(Structured(), (x.clone(), parts))
    for source, given in ((program, None), (program, specs), (program.module(), specs)):
        captured = capture(source, given)
        written = x.clone()
        want = Structured()(written, parts)
        got, new = run(captured, x, parts)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(new, {"x": written})
        assert [i.name for i in captured.inputs] == ["x", "parts_k", "parts_m"]
        assert captured.constants == {1: None, 2: 2, 4: 3}


def test_defaults_scalars_and_none() -> None:
    def function(x: torch.Tensor, mask: Any = None, power: int = 2) -> Any:
        return torch.pow(x, power) * 2

    gm = fx.symbolic_trace(function)
    x = torch.randn(3)
    torch.testing.assert_close(run(capture(gm, [x]), x)[0], x**2 * 2)
    captured = capture(gm, [x, None, 3])
    torch.testing.assert_close(run(captured, x)[0], x**3 * 2)
    assert [i.name for i in captured.inputs] == ["x"]
    with pytest.raises(ValueError, match=r"takes 3 inputs \(x, mask, power\), and 0 were given"):
        capture(gm, [])
    with pytest.raises(ValueError, match="an input is a tensor"):
        capture(gm, [object()])
    with pytest.raises(ValueError, match="carries no fake values"):
        capture(gm)


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


def test_symbolic_sizes() -> None:
    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, n: Any) -> Any:
            y = F.scaled_dot_product_attention(q, k, k)
            return torch.cat([y, y], 1).flatten(1), y.shape[1] * 2 + n

    captured = capture(
        fx.symbolic_trace(Attention()),
        [(("b", "q", 8), "float32"), (("b", "k", 8), "float32"), "extra"],
    )
    q, k = torch.randn(3, 5, 8), torch.randn(3, 7, 8)
    got = run(captured, q, k, 4)[0]
    torch.testing.assert_close(got, Attention()(q, k, 4))
    b, queries, width = captured.inputs[0].val.shape
    keys, n = captured.inputs[1].val.shape[1], captured.inputs[2].val
    assert [str(captured.symbols.size(s)) for s in (b, queries, keys, n)] == [
        "b",
        "q",
        "k",
        "extra",
    ]
    assert width == 8
    assert captured.inputs[1].val.shape[0].node.expr == b.node.expr


def test_two_variables_of_one_name_are_two_sizes() -> None:
    gm = fx.symbolic_trace(lambda x, y: torch.cat([x, y]))
    n, m = tirx.Var("n", "int64"), tirx.Var("n", "int64")
    captured = capture(gm, [((n, 2), "float32"), ((m, 2), "float32")])
    sizes = [captured.symbols.size(i.val.shape[0]) for i in captured.inputs]
    assert sizes[0].same_as(n)
    assert sizes[1].same_as(m)
    same = capture(gm, [((n, 2), "float32"), ((n, 2), "float32")])
    assert len({str(i.val.shape[0]) for i in same.inputs}) == 1


def first_half(x: torch.Tensor) -> torch.Tensor:
    return x[: int(x.shape[0]) // 2]


fx.wrap("first_half")


@pytest.mark.parametrize(
    ("function", "shapes", "message"),
    [
        (lambda x, y: x @ y, [("n", "m"), ("k", 4)], r"\[n, m\] X \[k, 4\]"),
        (lambda x, y: x.view(4, 3) + y, [("n",), (4, 3)], r"invalid for input of size n"),
        (lambda x, y: x + y, [("n",), (3,)], r"size of tensor a \(n\) must match"),
        (lambda x, y: first_half(x) + y, [("n",), (1,)], r"'n' is symbolic, .* for n = \d+ only"),
    ],
)
def test_a_size_is_never_fixed_in_silence(function: Any, shapes: Any, message: str) -> None:
    with pytest.raises(ImportFailure, match=message):
        capture(fx.symbolic_trace(function), [(shape, "float32") for shape in shapes])


def test_an_error_has_the_line_of_the_user() -> None:
    class Wrong(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(7, -1)  # the line

    program = torch.export.export(Wrong(), (torch.randn(7, 2),))
    with pytest.raises(ImportFailure, match=r"test_capture.py:\d+ +return x.reshape\(7, -1\)"):
        capture(program, [((3, 2), "float32")])


def test_data_dependent_sizes() -> None:
    captured = capture(fx.symbolic_trace(lambda x: torch.nonzero(x) + 1), [((6,), "float32")])
    x = torch.tensor([0.0, 1, 0, 2, 3, 0])
    torch.testing.assert_close(run(captured, x)[0], torch.nonzero(x) + 1)


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


def converters(*found: Any) -> dict[Any, Converter]:
    return {target: Converter(target, lambda *a, **k: None) for target in found}


def kept_names(captured: Captured) -> list[str]:
    calls = [kept(n.args[0]) for n in captured.graph.nodes if n.target is kept_call]
    return [str(getattr(c.target, "__name__", c.target)) for c in calls]


def test_calls_with_converters_stay_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    gm = fx.symbolic_trace(model)
    x = torch.randn(3, 4)
    captured = capture(gm, [(("n", 4), "float32")], converters=converters(nn.Linear))
    torch.testing.assert_close(run(captured, x)[0], model(x))
    assert kept_names(captured) == ["Linear", "Linear"]
    assert targets(captured).count(operator.getitem) == 2
    assert not any(n.target is kept_call for n in gm.graph.nodes), "the caller's graph is changed"


@pytest.mark.parametrize(
    ("target", "expected"),
    [(nn.Linear, ["Linear"] * 2), (F.relu, ["relu"]), (nn.LayerNorm, ["LayerNorm"] * 2)],
)
def test_calls_inside_a_leaf_stay_whole(target: Any, expected: list[str]) -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).eval()
    x = torch.randn(2, 5, 8)
    captured = capture(fx.symbolic_trace(model), [x], converters=converters(target))
    torch.testing.assert_close(run(captured, x)[0], model(x))
    assert kept_names(captured) == expected
    assert not any("forward" in vars(m) for m in model.modules()), "a patch is left behind"


def test_a_kept_call_that_writes_is_taken_apart() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    x = torch.randn(6, 4)
    with pytest.warns(UserWarning, match="not kept whole.*writes to its arguments or buffers"):
        captured = capture(fx.symbolic_trace(model), [x], converters=converters(nn.BatchNorm1d))
    assert kept_names(captured) == []
    twin = copy.deepcopy(model)
    got, new = run(captured, x)
    torch.testing.assert_close(got, twin(x))
    torch.testing.assert_close(new, {k: v for k, v in twin.state_dict().items() if k in new})
    assert len(new) == 3


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
