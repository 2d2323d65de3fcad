"""What a capture takes: structures, symbolic sizes, and converters whose calls stay whole."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captured import run, targets
from torch import fx, nn

from fx2relax.capture import Captured, capture
from fx2relax.compat import tirx
from fx2relax.errors import ImportFailure
from fx2relax.kept import kept, kept_call
from fx2relax.registry import Converter


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
    with pytest.raises(ImportFailure, match=r"inputs.py:\d+ +return x.reshape\(7, -1\)"):
        capture(program, [((3, 2), "float32")])


def test_data_dependent_sizes() -> None:
    captured = capture(fx.symbolic_trace(lambda x: torch.nonzero(x) + 1), [((6,), "float32")])
    x = torch.tensor([0.0, 1, 0, 2, 3, 0])
    torch.testing.assert_close(run(captured, x)[0], torch.nonzero(x) + 1)


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
