"""Graphs that were traced before are not traced again, where nothing is different."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch._functorch import config as functorch_config

import fx2relax
from fx2relax import logs, registry, stages
from fx2relax.cli import main


class _Watch(stages.Observer):
    def __init__(self) -> None:
        self.found = 0

    def note(self, stage: str, what: dict[str, Any]) -> None:
        self.found += stage == "trace"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FX2RELAX_CACHE", "1")
    monkeypatch.setenv("FX2RELAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(logs, "are_wanted", lambda: False)  # pytest reads PyTorch's trace
    torch._logging.set_logs()
    torch.manual_seed(0)
    return tmp_path / "programs"


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Watch]:
    watch = _Watch()
    monkeypatch.setattr(stages, "listeners", [*stages.listeners, watch])
    yield watch
    torch._dynamo.reset()


def _call(fn: Any, *args: Any, **kwargs: Any) -> Any:
    """What a function gives when it is compiled anew, and what it makes of its arguments."""
    torch._dynamo.reset()
    return torch.compile(fn, backend="relax", fullgraph=True, **kwargs)(*args)


def _twice(fn: Any, *args: Any, **kwargs: Any) -> None:
    """Compare two compilations with eager; arguments are written to as in eager."""
    expected_args = copy.deepcopy(args)
    expected = fn(*expected_args)
    for _ in range(2):
        given = copy.deepcopy(args)
        torch.testing.assert_close(_call(fn, *given, **kwargs), expected)
        torch.testing.assert_close(given, expected_args)


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.all = torch.nn.Linear(16, 48)
        self.norm = torch.nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.all(x).view(2, 5, 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.norm(x + y.transpose(1, 2).reshape(2, 5, 16))[..., None]


class Cache(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(2, 8, 4))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.keys.index_copy_(1, at, x)
        return (self.keys * 2).sum(1)


def _casts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ w
    return y.float() + x


FOUND: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "attention": (Attention().eval(), (torch.randn(2, 5, 16),)),
    "several results": (lambda x: (x.sin(), x.sum(), x.max(0)[1]), (torch.randn(3, 4),)),
    "a layout": (
        torch.nn.Conv2d(3, 4, 3),
        (torch.randn(1, 3, 8, 8).to(memory_format=torch.channels_last),),
    ),
    "a constant": (lambda x: x + torch.tensor([1.0, 2.0]), (torch.randn(3, 2),)),
    "half the graph in another dtype": (_casts, (torch.randn(4, 4), torch.randn(4, 4))),
    "a cache that is written": (Cache(), (torch.randn(2, 1, 4), torch.tensor([3]))),
    "an argument that is written": (lambda x, y: (x.add_(y), y * 2)[1], (torch.ones(3),) * 2),
    "half a network": (
        torch.nn.Sequential(torch.nn.Conv1d(3, 4, 3), torch.nn.BatchNorm1d(4)).eval(),
        (torch.randn(2, 3, 8),),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_graph_is_traced_once(name: str, watch: _Watch) -> None:
    fn, args = FOUND[name]
    with torch.no_grad():
        _twice(fn, *copy.deepcopy(args))
    assert watch.found == 1


def _duplicated(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).add_(1)


@torch.library.custom_op("fx2relax_test::doubled", mutates_args=())
def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@_doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return y * 2


NOT_FOUND: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "a view of an input": (lambda x: (x.t(), x + 1), (torch.randn(3, 4),)),
    "a view that is written": (_duplicated, (torch.randn(3, 4),)),
    "a draw": (lambda x: F.dropout(x, 0.5) * 0, (torch.randn(3, 4),)),
    "an operator of the user's": (lambda x: _doubled(x) + 1, (torch.randn(3, 4),)),
}


@pytest.mark.parametrize("name", NOT_FOUND)
def test_more_than_a_graph_is_traced_again(name: str, watch: _Watch) -> None:
    fn, args = NOT_FOUND[name]
    with torch.no_grad():
        _twice(fn, *args)
    assert watch.found == 0


def test_inputs_that_share_what_is_written(watch: _Watch) -> None:
    for _ in range(2):
        x = torch.arange(8.0)
        with torch.no_grad():
            result = _call(_both, x[:6], x[2:])
        torch.testing.assert_close(result, torch.tensor([3.0, 4, 5, 6, 6, 7]).mul(2))
        torch.testing.assert_close(x, torch.tensor([1.0, 2, 3, 4, 5, 6, 6, 7]))
    assert watch.found == 0


def test_symbolic_sizes_are_traced_again(watch: _Watch) -> None:
    _twice(lambda x: x.softmax(1) * x.shape[0], torch.randn(3, 4), dynamic=True)
    assert watch.found == 0


def test_training_is_traced_again(watch: _Watch) -> None:
    net = torch.nn.Linear(4, 3)
    for _ in range(2):
        net.zero_grad()
        _call(net, torch.ones(2, 4)).sum().backward()
        assert net.weight.grad is not None
        torch.testing.assert_close(net.weight.grad, torch.full((3, 4), 2.0))
    assert watch.found == 0
    with torch.no_grad():
        _twice(net, torch.ones(2, 4))
    assert watch.found == 1


@contextlib.contextmanager
def _dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


OTHER: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "the default dtype": _dtype,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "gradients": torch.enable_grad,
    "determinism": _deterministic,
    "attention's kernels": lambda: torch.nn.attention.sdpa_kernel(
        torch.nn.attention.SDPBackend.MATH
    ),
    "a setting of AOTAutograd's": lambda: functorch_config.patch(view_replay_for_aliased_outputs=1),
    "a mode of the user's": torch.overrides.BaseTorchFunctionMode,
}


def _made(x: torch.Tensor) -> torch.Tensor:
    return (x @ torch.ones(4, 4, dtype=x.dtype)).to(torch.get_default_dtype()) + x.mean()


@pytest.mark.parametrize("name", OTHER)
def test_another_setting_is_another_trace(name: str, watch: _Watch) -> None:
    x = torch.randn(3, 4)
    with torch.no_grad():
        _call(_made, x)
        with OTHER[name]():
            torch.testing.assert_close(_call(_made, x), _made(x))
        assert watch.found == 0
        torch.testing.assert_close(_call(_made, x), _made(x))
    assert watch.found == 1


def test_other_inputs_are_another_trace(watch: _Watch) -> None:
    given = [
        torch.randn(4, 4),
        torch.randn(4, 4).t(),
        torch.randn(5, 4),
        torch.randn(4, 4, dtype=torch.float64),
        torch.randn(5, 4)[1:],
        torch.randn(4, 4, dtype=torch.complex64),
    ]
    with torch.no_grad():
        for x in given:
            torch.testing.assert_close(_call(lambda x: x * 2 + 1, x), x * 2 + 1)
    assert watch.found == 0


def test_autocast_reaches_no_program_that_was_found(watch: _Watch) -> None:
    net, x = torch.nn.Linear(16, 16), torch.randn(8, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        _twice(lambda x: net(x).float().softmax(-1), x)
    assert watch.found == 1


def test_other_weights_have_the_same_trace(watch: _Watch) -> None:
    with torch.no_grad():
        for _ in range(3):
            net, x = torch.nn.Linear(4, 3), torch.randn(2, 4)
            torch.testing.assert_close(_call(net, x), net(x))
    assert watch.found == 2


def test_constants_are_told_apart(watch: _Watch) -> None:
    x = torch.randn(4)
    with torch.no_grad():
        for factor in (1, 1.0, 2, True, 1 + 1e-15, -0.0, 0.0):
            constant = torch.tensor([factor] * 4, dtype=torch.float64)
            torch.testing.assert_close(
                _call(lambda x, f=factor, c=constant: x * f + c, x), x * factor + constant
            )
    assert watch.found == 0


def test_nothing_requires_a_gradient_where_gradients_are_on(watch: _Watch) -> None:
    for _ in range(2):
        assert not _call(lambda x: x.sin() + 1, torch.randn(3)).requires_grad
    assert watch.found == 1


def test_statistics_are_written(watch: _Watch) -> None:
    net = torch.nn.Sequential(torch.nn.Conv1d(3, 4, 3), torch.nn.BatchNorm1d(4))
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        for _ in range(2):
            eager = copy.deepcopy(net)
            torch.testing.assert_close(_call(net, x), eager(x))
            torch.testing.assert_close(net.state_dict(), eager.state_dict())
    assert int(net[1].num_batches_tracked) == 2
    assert watch.found == 1


def test_whoever_reads_logs_has_it_traced(watch: _Watch) -> None:
    with torch.no_grad():
        _call(_made, torch.randn(3, 4))
        torch._logging.set_logs(aot_graphs=True)
        try:
            _call(_made, torch.randn(3, 4))
        finally:
            torch._logging.set_logs()
    assert watch.found == 0


def test_a_damaged_trace_is_made_again(
    watch: _Watch, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(3, 4)
    with torch.no_grad():
        _call(_made, x)
        (stored,) = folder.glob("*.trace")
        stored.write_bytes(stored.read_bytes()[:-10])
        with caplog.at_level(logging.WARNING, "fx2relax"):
            torch.testing.assert_close(_call(_made, x), _made(x))
        assert "the stored trace" in caplog.text
        assert watch.found == 0
        _call(_made, x)
    assert watch.found == 1


def test_a_trace_without_its_program(watch: _Watch, folder: Path) -> None:
    x = torch.randn(3, 4)
    with torch.no_grad():
        _call(_made, x)
        for program in folder.glob("*.program"):
            program.unlink()
        torch.testing.assert_close(_call(_made, x), _made(x))
        assert watch.found == 0
        _call(_made, x)
    assert watch.found == 1


def test_no_trace_where_nothing_is_to_be_kept(watch: _Watch, folder: Path) -> None:
    for _ in range(2):
        _call(_made, torch.randn(3, 4), options={"cache": False})
    assert not list(folder.glob("*.trace"))


def test_converters_of_the_users_are_asked(watch: _Watch) -> None:
    def tripled(x: Any) -> Any:
        return fx2relax.converters.common.emit(fx2relax.compat.op.multiply(x, x))

    x = torch.randn(3)
    with torch.no_grad():
        torch.testing.assert_close(_call(torch.sin, x), x.sin())
        with registry.overrides({torch.ops.aten.sin.default: tripled}):
            torch.testing.assert_close(_call(torch.sin, x), x * x)
        torch.testing.assert_close(_call(torch.sin, x), x.sin())
        assert watch.found == 1
        with registry.overrides({torch.ops.aten.cos.default: tripled}):  # of nothing in the graph
            _twice(torch.sin, x)
    assert watch.found == 2


def test_a_rule_of_the_users_is_asked(watch: _Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3)
    with torch.no_grad():
        _twice(torch.sin, x)
        rules = torch._decomp.global_decomposition_table["post_autograd"]
        monkeypatch.setitem(rules, torch.ops.aten.sin.default, lambda x: x.cos())
        _call(torch.sin, x)
    assert watch.found == 1


def test_the_cache_lists_traces(watch: _Watch) -> None:
    with torch.no_grad():
        _call(_made, torch.randn(3, 4))
    result = CliRunner().invoke(main, ["cache", "list", "--json"])
    kinds = [entry["kind"] for entry in json.loads(result.stdout)["entries"]]
    assert sorted(k for k in kinds if k != "helper") == ["program", "trace"]
    size = CliRunner().invoke(main, ["cache", "size"])
    assert "1 trace" in size.stdout


def test_those_that_ship_keep_no_call_whole() -> None:
    """What is asked of converters where a trace is found is asked without importing them."""
    assert {c.kind for c in registry.registered().values()} == {"overload"}
