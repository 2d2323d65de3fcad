"""Odd tensors at the boundary: the answer is eager's, or an error that names the argument."""

import pytest
import torch

from fx2relax.importer import import_graph
from fx2relax.layouts import dense_permutation
from fx2relax.params import InputSpec
from fx2relax.pipeline import build
from fx2relax.runtime.boundary import ready
from fx2relax.runtime.program import Program
from fx2relax.testing import assert_matches_eager

ODD = {
    "misaligned": lambda: torch.randn(1025)[1:],
    "strided": lambda: torch.randn(8, 9)[:, ::2],
    "transposed": lambda: torch.randn(4, 5).t(),
    "permuted": lambda: torch.randn(2, 3, 4, 5).permute(0, 3, 1, 2),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "expanded 0-d": lambda: torch.tensor(2.0).expand(5),
    "0-d": lambda: torch.tensor(1.5),
    "zero-size": lambda: torch.empty(0, 3),
    "requires_grad": lambda: torch.randn(3, requires_grad=True),
    "size one": lambda: torch.randn(1, 4, 1).transpose(0, 2),
    "negative view": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "bool": lambda: torch.tensor([True, False]),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_inputs(name):
    x = ODD[name]()
    assert_matches_eager(lambda a: (a * 2, a * 3 + a), x)


@pytest.mark.parametrize("name", ["misaligned", "transposed", "channels_last", "expanded"])
def test_odd_inputs_under_dynamic(name):
    assert_matches_eager(lambda a: a * 2 + 1, ODD[name](), dynamic=True)


@pytest.mark.parametrize("name", ["transposed", "channels_last", "expanded", "misaligned"])
def test_odd_inputs_gradients(name):
    x = ODD[name]().detach()
    assert_matches_eager(lambda a, b: a * b * 2, x, torch.randn(x.shape), grad=True)


def test_odd_weights():
    model = torch.nn.Linear(6, 4, bias=False)
    model.weight = torch.nn.Parameter(torch.randn(25)[1:].view(4, 6))
    assert model.weight.data_ptr() % 64
    with torch.no_grad():
        compiled = torch.compile(model, backend="relax")
        x = torch.randn(2, 6)
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x + 1).t(),
        lambda x: (x + 1).expand(3, 4, 4),
        lambda x: (x + 1).t().expand(3, 4, 4),
        lambda x: (x + 1).unsqueeze(0).expand(3, 4, 4).permute(2, 0, 1),
        lambda x: x.t() + 1,
        lambda x: (x + 1)[:, ::2],
    ],
)
def test_output_strides(fn):
    assert_matches_eager(fn, torch.randn(4, 4))


def _program():
    graph = torch.fx.experimental.proxy_tensor.make_fx(
        lambda x, y: torch.ops.aten.add.Tensor(x, y), tracing_mode="fake"
    )(torch.randn(3, 4), torch.randn(3, 4))
    nodes = [n for n in graph.graph.nodes if n.op == "placeholder"]
    specs = [
        InputSpec(name, "user", node.meta["val"], position=i)
        for i, (name, node) in enumerate(zip(("left", "right"), nodes, strict=True))
    ]
    imported = import_graph(graph, specs)
    return Program(imported, build(imported.mod))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.randn(3, 5), r"'right': expected shape \(3, 4\), got \(3, 5\)"),
        (torch.randn(3), r"'right': expected shape \(3, 4\), got \(3,\)"),
        (torch.randn(3, 4).double(), "'right': expected dtype torch.float32, got .*float64"),
        (torch.randn(3, 4, device="meta"), "'right': expected a tensor on cpu, got .*meta"),
        (None, "'right': expected a tensor, got NoneType"),
        ("text", "'right': expected a tensor, got str"),
    ],
)
def test_wrong_argument_is_a_value_error_that_names_it(value, message):
    program = _program()
    with pytest.raises(ValueError, match=message):
        program(torch.randn(3, 4), value)


def test_missing_argument_is_named():
    with pytest.raises(ValueError, match="'right' is missing"):
        _program()(torch.randn(3, 4))


def test_ready_passes_good_tensors_through():
    good = torch.randn(4, 4)
    assert ready(good) is good
    odd = torch.randn(17)[1:]
    assert ready(odd) is odd
    packed = torch.frombuffer(bytearray(range(33)), dtype=torch.int64, offset=1, count=4)
    assert ready(packed).data_ptr() % 8 == 0
    torch.testing.assert_close(ready(packed), packed)


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((2, 3), (3, 1), None),
        ((2, 3), (1, 2), (1, 0)),
        ((2, 3, 4, 5), (60, 1, 15, 3), (0, 2, 3, 1)),
        ((2, 3), (6, 2), None),
        ((3, 4), (1, 0), None),
        ((1, 4, 1), (1, 1, 4), None),
    ],
)
def test_dense_permutation(shape, strides, expected):
    assert dense_permutation(shape, strides) == expected
