"""`torch.compile(backend="relax")` as PyTorch's users know `torch.compile`."""

import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from unconverted import first, second

import fx2relax
from fx2relax.testing import assert_matches_eager


def test_needs_no_import_of_the_package():
    code = (
        "import sys, torch\n"
        "assert 'fx2relax' not in sys.modules\n"
        "f = torch.compile(lambda x: x * 2 + 1, backend='relax', fullgraph=True)\n"
        "x = torch.arange(6.0)\n"
        "assert torch.equal(f(x), x * 2 + 1)\n"
        "import fx2relax\n"
        "assert fx2relax.stats()['graphs'] == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_unknown_option_lists_the_known_ones():
    compiled = torch.compile(lambda x: x + 1, backend="relax", options={"libary": "none"})
    with pytest.raises(Exception, match=r"unknown option 'libary'.*on_unsupported, library"):
        compiled(torch.ones(3))


def test_unknown_value_lists_the_known_ones():
    compiled = torch.compile(lambda x: x + 1, backend="relax", options={"library": "mkl"})
    with pytest.raises(Exception, match=r"library='mkl'.*'torch' or 'none'"):
        compiled(torch.ones(3))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_modes(mode):
    compiled = torch.compile(lambda x: x * 3, backend="relax", mode=mode)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 3.0))


def test_nested_outputs_none_and_constants():
    def fn(x, pair):
        a, b = pair["a"], pair["b"]
        return {"sum": x + a, "none": None, "rest": (b * 2, [x * 3, 7, "text"])}

    x = torch.randn(3, 4)
    assert_matches_eager(fn, x, {"a": torch.randn(4), "b": torch.randn(2)})


def test_graph_without_inputs():
    assert_matches_eager(lambda: torch.full((2, 3), 1.5) * 2)


def test_graph_without_outputs():
    def fn(x):
        x.mul_(2)

    assert_matches_eager(fn, torch.randn(4))


def test_mutated_input():
    def fn(x, y):
        x.add_(y)
        return x * 2

    assert_matches_eager(fn, torch.randn(4), torch.randn(4))


def test_write_through_a_view():
    def fn(x):
        x[0].mul_(2)
        return x + 1

    assert_matches_eager(fn, torch.randn(4, 4))


class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x):
        self.total += x
        return x * self.total


def test_mutated_buffer():
    eager, compiled = Counter(), Counter()
    optimised = torch.compile(compiled, backend="relax", fullgraph=True)
    for _ in range(3):
        x = torch.randn(3)
        with torch.no_grad():
            torch.testing.assert_close(optimised(x), eager(x))
    torch.testing.assert_close(compiled.total, eager.total)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x, x * 2),
        lambda x: (x.t(), x * 2),
        lambda x: (x[1:], x * 2),
        lambda x: (y := x * 2, y.t()),
        lambda x: (y := x * 2, y),
        lambda x: (x.detach(), x * 2),
        lambda x: x.view(-1),
    ],
    ids=["input", "transposed", "sliced", "view-of-output", "twice", "detached", "view"],
)
def test_aliases(fn):
    assert_matches_eager(fn, torch.randn(4, 4))


def test_aliased_inputs():
    base = torch.randn(8)

    def fn(x, y):
        x.mul_(2)
        return x + y

    assert_matches_eager(fn, base[:4], base[:4])
    assert_matches_eager(fn, base[:4], base[2:6])


def test_graph_breaks_are_left_to_dynamo():
    def fn(x):
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    assert_matches_eager(fn, torch.randn(4), fullgraph=False)


def test_gradients_accumulate():
    assert_matches_eager(lambda x, y: (x * y + x) * y, torch.randn(3), torch.randn(3), grad=True)


def test_module_gradients():
    assert_matches_eager(torch.nn.Linear(5, 3), torch.randn(4, 5), grad=True)


def test_dynamic_sizes_compile_once():
    fx2relax.reset_stats()
    torch._dynamo.reset()
    fn = torch.compile(lambda x, y: x * 2 + y, backend="relax", dynamic=True)
    for rows, columns in [(4, 5), (7, 3), (11, 2)]:
        x, y = torch.randn(rows, columns), torch.randn(columns)
        torch.testing.assert_close(fn(x, y), x * 2 + y)
    assert fx2relax.stats()["graphs"] == 1
    assert fx2relax.stats()["calls"] == 3


def test_sizes_as_inputs_and_outputs():
    def fn(x, n):
        return x.view(n, -1) * 2, x.shape[0] * n, x.shape[0] // 2

    assert_matches_eager(fn, torch.randn(12), 3, dynamic=True)


@pytest.mark.parametrize("change", ["optimiser", "load_state_dict", "assignment", "data"])
def test_changed_weights_are_seen_without_recompiling(change):
    model = torch.nn.Linear(6, 4)
    other = torch.nn.Linear(6, 4)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="relax")
    x = torch.randn(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        fx2relax.reset_stats()
        if change == "optimiser":
            model.weight.grad = torch.ones_like(model.weight)
            torch.optim.SGD(model.parameters(), lr=0.5).step()
        elif change == "load_state_dict":
            model.load_state_dict(other.state_dict())
        elif change == "assignment":
            model.weight.copy_(other.weight)
        else:
            model.weight.data += 1
        torch.testing.assert_close(compiled(x), model(x))
    assert fx2relax.stats()["graphs"] == 0


def test_stats_count_torch_calls():
    fx2relax.reset_stats()
    torch._dynamo.reset()
    fn = torch.compile(lambda x: first(x * 2), backend="relax")
    x = torch.rand(5)
    torch.testing.assert_close(fn(x), first(x * 2))
    stats = fx2relax.stats()
    assert stats["fallback_ops"] == {"fx2relax_tests.first.default": 1}
    assert stats["nodes_fallback"] == 1
    assert stats["nodes_total"] == stats["nodes_compiled"] + 1
    assert stats["compile_seconds"] > 0
    assert stats["calls"] == 1


def test_raise_lists_every_missing_operator_and_the_remedy():
    def fn(x):
        return first(x) + second(x) * second(x)

    compiled = torch.compile(fn, backend="relax", options={"on_unsupported": "raise"})
    with pytest.raises(Exception, match="2 operators in this graph have no Relax") as caught:
        compiled(torch.rand(3))
    text = str(caught.value)
    assert "fx2relax_tests.first.default" in text
    assert "2 uses" in text
    assert "test_backend.py" in text
    assert "converts" in text


def test_failed_build_falls_back_with_a_warning(monkeypatch, caplog):
    def broken(*_args, **_kwargs):
        raise RuntimeError("no such pass")

    monkeypatch.setattr("fx2relax.pipeline.give", broken)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x * 5, backend="relax")
    with caplog.at_level(logging.WARNING, logger="fx2relax"):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 5.0))
    assert "no such pass" in caplog.text
    assert "reproduce.py" in caplog.text


def test_a_size_that_a_guard_bounds():
    table = torch.randn(6, 2)

    def positions(x):
        return x + table[: x.shape[0]]

    compiled = torch.compile(positions, backend="relax", dynamic=True, fullgraph=True)
    fx2relax.reset_stats()
    for n in (4, 6, 3):
        x = torch.randn(n, 2)
        torch.testing.assert_close(compiled(x), positions(x))
    assert fx2relax.stats()["graphs"] == 1
    with pytest.raises(Exception, match=r"must match|broadcast"):
        compiled(torch.randn(7, 2))


def test_what_aot_autograd_refuses_runs_in_pytorch(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.rand(5) + 1
    got = torch.compile(lambda x: x.clone().polygamma_(1), backend="relax")(x)
    torch.testing.assert_close(got, x.polygamma(1))
    assert "could not be traced and runs in PyTorch" in caplog.text
    strict = torch.compile(
        lambda x: x.clone().polygamma_(1), backend="relax", options={"on_unsupported": "raise"}
    )
    with pytest.raises(Exception, match="polygamma_"):
        strict(x)


_PLANT = """import fx2relax


def _fails(x):
    raise ValueError("no such function")


fx2relax.converts(torch.ops.aten.sin.default, override=True)(_fails)
"""


def test_a_reproducer_of_symbolic_sizes_fails_in_the_same_way(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def fails(x: Any) -> Any:
        raise ValueError("no such function")

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin().clamp(max=float("inf")), torch.ones(2 * x.shape[0])

    options = {"call_function_map": {torch.ops.aten.sin.default: fails}, "cache": False}
    torch.compile(function, backend="relax", dynamic=True, options=options)(torch.randn(3, 8))
    found = re.search(r"reproducer: (\S+)", caplog.text)
    assert found is not None
    text = Path(found[1]).read_text(encoding="utf-8")
    script = tmp_path / "planted.py"
    script.write_text(text.replace("import fx2relax\n", _PLANT), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert "ValueError: no such function" in done.stderr
