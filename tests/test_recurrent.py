"""Recurrent layers and cells: inference, gradients, packed sequences, dropout, import."""

from __future__ import annotations

import copy

import pytest
import torch
from functorch.compile import make_boxed_func
from networks.check import export, run_without_torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils._pytree import tree_leaves
from tvm.relax.frontend import detach_params

import fx2relax
from fx2relax import onednn, recurrent
from fx2relax.testing import assert_matches_eager, close

KINDS = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
    "projected": (nn.LSTM, {"proj_size": 3}),
}
pytestmark = [
    pytest.mark.sweep,
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]


def layer(kind: str, *sizes: int, **settings):
    torch.manual_seed(0)
    cls, extra = KINDS[kind]
    return cls(*sizes, **extra, **settings)


def packed(*lengths: int, width: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    sequences = pack_sequence([torch.randn(n, width) for n in lengths])
    return sequences.data, sequences.batch_sizes


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


class Packed(nn.Module):
    """A recurrent module over a packed sequence that comes as its two tensors.

    Not through the module's own forward: it asks for the largest batch, which Dynamo does not know.
    """

    def __init__(self, inner: nn.RNNBase) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, data, batch_sizes, *states):
        m = self.inner
        function = getattr(torch, m.mode.lower())
        hx = states if m.mode == "LSTM" else states[0]
        settings = (m.bias, m.num_layers, 0.0, m.training, m.bidirectional)
        return function(data, batch_sizes, hx, m._flat_weights, *settings)


def states_of(module: nn.RNNBase, batch: int) -> list[torch.Tensor]:
    count = module.num_layers * (2 if module.bidirectional else 1)
    sizes = [module.proj_size or module.hidden_size, module.hidden_size]
    return [torch.randn(count, batch, n) for n in sizes[: 1 + (module.mode == "LSTM")]]


@pytest.mark.parametrize("kind", KINDS)
def test_stacked_and_bidirectional_with_gradients(kind):
    module = layer(kind, 4, 5, num_layers=2, bidirectional=True, batch_first=True)
    assert_matches_eager(module, torch.randn(6, 7, 4), grad=True)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences(kind):
    module = layer(kind, 4, 5, bias=False, bidirectional=kind == "lstm")
    inputs = (*packed(6, 6, 4, 2, 1), *states_of(module, 5))
    assert_matches_eager(Packed(module), *inputs, grad=True)


def test_a_packed_sequence_through_the_module():
    module = frozen(layer("lstm", 4, 5))

    def run(data, batch_sizes):
        y, states = module(PackedSequence(data, batch_sizes))
        return y.data, states

    assert_matches_eager(run, *packed(4, 2, 2))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("lstm", torch.float16),
        ("lstm", torch.bfloat16),
        ("gru", torch.float64),
        ("gru", torch.float16),
        ("relu", torch.bfloat16),
    ],
)
def test_dtypes(kind, dtype):
    module = frozen(layer(kind, 4, 37).to(dtype))
    assert_matches_eager(module, torch.randn(5, 3, 4, dtype=dtype))


def test_gradients_in_half_precision():
    """Eager rounds each operation, we each step: held to a float64 run, not to one another."""
    module, x = layer("gru", 4, 8).bfloat16(), torch.randn(9, 2, 4)

    def gradients(model, fn, data):
        fn(data)[0].sum().backward()
        return [p.grad.double() for p in model.parameters()]

    exact, eager, ours = (
        copy.deepcopy(module).to(d) for d in (torch.float64, *[torch.bfloat16] * 2)
    )
    wanted = gradients(exact, exact, x.bfloat16().double())
    theirs = gradients(eager, eager, x.bfloat16())
    compiled = torch.compile(ours, backend="relax", fullgraph=True)
    for got, other, true in zip(
        gradients(ours, compiled, x.bfloat16()), theirs, wanted, strict=True
    ):
        assert (got - true).norm() <= 1.5 * (other - true).norm()


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_sizes_change_without_compiling_again(kind):
    module = frozen(layer(kind, 4, 5))
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="relax", dynamic=True, fullgraph=True)
    before = fx2relax.stats()
    for steps, batch in ((5, 3), (9, 2), (2, 11)):
        x = torch.randn(steps, batch, 4)
        close(compiled(x)[0], module(x)[0])
    after = fx2relax.stats()
    assert after["graphs"] == before["graphs"] + 1
    assert after["nodes_fallback"] == before["nodes_fallback"]


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_weights_larger_than_the_cache(kind):
    module = layer(kind, 8, 350)
    assert_matches_eager(module, torch.randn(3, 6, 8), grad=True, tol=1e-4)


def test_without_a_batch_and_with_given_states():
    h, c = torch.randn(1, 5), torch.randn(1, 5)
    module = layer("lstm", 4, 5, bias=False)
    assert_matches_eager(lambda x, h, c: module(x, (h, c)), torch.randn(7, 4), h, c, grad=True)


@pytest.mark.parametrize("kind", ["lstm", "gru", "tanh"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_no_time_steps_and_no_sequences(kind, batch_first):
    """Eager refuses the first and computes the second."""
    module = layer(kind, 4, 5, batch_first=batch_first)
    sizes = [(0, 3, 4), (3, 0, 4)]
    none, empty = reversed(sizes) if batch_first else sizes
    assert_matches_eager(module, torch.randn(empty))
    for run in (module, torch.compile(module, backend="relax")):
        with pytest.raises(RuntimeError, match="sequence length to be larger than 0"):
            run(torch.randn(none))


def test_a_state_alone_gives_gradients():
    module = layer("gru", 4, 5, num_layers=2)
    assert_matches_eager(lambda x: module(x)[1].sum(), torch.randn(7, 2, 4), grad=True)


def test_not_a_number_and_infinities():
    x = torch.randn(4, 3, 4)
    x[1, 0, 0], x[2, 1, 1], x[2, 2, 1] = float("nan"), float("inf"), float("-inf")
    lstm, relu = frozen(layer("lstm", 4, 5)), frozen(layer("relu", 4, 5))
    assert_matches_eager(lambda x: (lstm(x), relu(x)), x)


def test_dropout_between_layers_draws_what_eager_draws():
    module = layer("lstm", 4, 16, num_layers=2, dropout=0.5)
    x = torch.randn(6, 5, 4)
    assert_matches_eager(module, x, grad=True, seed=3, torch_calls=True)
    torch.manual_seed(3)
    trained = module(x)[0]
    assert not torch.allclose(trained, module.eval()(x)[0])  # dropout did something


def test_a_long_sequence_trains_as_one_kernel():
    module = layer("lstm", 40, 64, num_layers=2, batch_first=True)
    before = fx2relax.stats()["nodes_total"]
    assert_matches_eager(module, torch.randn(2, 160, 40), grad=True, tol=1e-4)
    assert fx2relax.stats()["nodes_total"] - before < 200


def test_batch_sizes_that_do_not_fit():
    data, sizes = packed(4, 3)
    module = Packed(frozen(layer("lstm", 4, 5)))
    states = states_of(module.inner, 2)
    compiled = torch.compile(module, backend="relax", fullgraph=True)
    compiled(data, sizes, *states)
    with pytest.raises(RuntimeError, match="batch sizes"):
        compiled(data, sizes * 1000, *states)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_exported_and_run_without_pytorch(kind):
    module = layer(kind, 4, 5, num_layers=2, bidirectional=True, batch_first=True)
    x = torch.randn(3, 7, 4)
    mod, params = detach_params(fx2relax.from_fx(export(module, (x,), {}), [x]))
    got = run_without_torch(mod, params, [x])
    with torch.no_grad():
        expected = tree_leaves(module(x))
    for one, wanted in zip(got, expected, strict=True):
        close(one, wanted)


def test_the_layer_of_pytorchs_own_decomposition():
    module, h, c = frozen(layer("lstm", 4, 5)), torch.randn(1, 2, 5), torch.randn(1, 2, 5)

    def run(x, h, c):
        last = (False, [], 2, 5, 1, True, False, False, False)
        layer = torch.ops.aten.mkldnn_rnn_layer.default
        return layer(x, *module._flat_weights, h, c, *last)[:3]

    assert_matches_eager(run, torch.randn(3, 2, 4), h, c)


def test_cells():
    torch.manual_seed(0)
    lstm, gru, rnn = nn.LSTMCell(4, 5), nn.GRUCell(4, 5), nn.RNNCell(4, 5, nonlinearity="relu")

    def cells(x, h, c):
        return lstm(x, (h, c)), gru(x, h), rnn(x, h), gru(x)

    assert_matches_eager(cells, torch.randn(3, 4), torch.randn(3, 5), torch.randn(3, 5), grad=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_operator_in_pytorch_itself(kind):
    """A graph that cannot be built runs these; they are what AOTAutograd saw."""
    module = layer(kind, 4, 5).double()
    data, sizes = packed(4, 3, 3, 1)
    mode = "lstm" if kind == "projected" else kind
    states = [
        torch.randn(1, 4, s, dtype=torch.float64) for s in (3 if kind == "projected" else 5, 5)
    ]
    hx = tuple(states) if mode == "lstm" else states[0]
    results = []
    for ours in (True, False):
        x = data.double().requires_grad_()
        module.zero_grad()
        if ours:
            settings = (module.bias, 1, 0.0, True, False)
            y = recurrent._packed_kernel(mode)(x, sizes, hx, module._flat_weights, *settings)[0]
        else:
            y = module(PackedSequence(x, sizes), hx)[0].data
        y.square().sum().backward()
        results.append([y, x.grad, *[p.grad for p in module.parameters()]])
    for got, wanted in zip(*results, strict=True):
        close(got, wanted)


def test_other_backends_see_pytorchs_own_decomposition():
    seen = []

    def compiler(graph, inputs):
        seen.append(str(graph.graph))
        return make_boxed_func(graph.forward)

    other = aot_autograd(fw_compiler=compiler)
    with torch.no_grad():
        for backend in ("relax", other):  # ours, once loaded, has Dynamo trace such layers
            torch._dynamo.reset()
            torch.compile(layer("lstm", 4, 5), backend=backend)(torch.ones(2, 3, 4))
    assert "mkldnn_rnn_layer" in seen[0]
    assert "fx2relax" not in seen[0]


@pytest.mark.skipif(onednn.computes_in("bfloat16"), reason="eager has a kernel for them here")
def test_lstms_under_autocast_are_computed_where_eager_cannot():
    module, x = layer("lstm", 4, 5), torch.randn(2, 3, 4)

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)[0]

    with torch.no_grad():
        with pytest.raises(RuntimeError, match="could not create a primitive descriptor"):
            run(x)
        y = torch.compile(run, backend="relax")(x)
        assert y.dtype is torch.bfloat16
        torch.testing.assert_close(y.float(), module(x)[0], rtol=0.02, atol=0.02)
