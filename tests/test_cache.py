"""Compiled programs on disk: found again, by everything that matters, and never trusted blindly."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from unconverted import first

import fx2relax
from fx2relax import cache, graph_key
from fx2relax.compat import op
from fx2relax.literals import NoSpelling, decode, encode
from fx2relax.testing import assert_matches_eager


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FX2RELAX_CACHE", "1")
    monkeypatch.setenv("FX2RELAX_CACHE_DIR", str(tmp_path))
    fx2relax.reset_stats()
    return tmp_path / "programs"


def _compiled(fn: Any, *args: Any, **kwargs: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(fn, backend="relax", fullgraph=True, **kwargs)(*args)


def _counts() -> tuple[int, int]:
    stats = fx2relax.stats()
    return stats["cache_hits"], stats["cache_misses"]


def _programs(store: Path) -> list[Path]:
    return sorted(store.glob("*.program"))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.norm(self.first(x).relu())
        self.seen += y.sum(0)
        return y, y.t(), y * torch.tensor([1.0, 2.0] * 4)


def _weights(x: torch.Tensor) -> torch.Tensor:
    return torch.randn(3, 4) @ x


torch.manual_seed(0)
CASES: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "weights, buffers, views": (Net(), (torch.randn(5, 6),), {"grad": True}),
    "evaluation": (Net().eval(), (torch.randn(5, 6),), {}),
    "written input": (lambda x: x[1:].mul_(2) + x[:-1], (torch.randn(4, 3),), {}),
    "symbolic sizes": (
        lambda x, y: (x.reshape(-1)[: y.shape[0]] + y, x.shape[0] * 2, x.t()),
        (torch.randn(4, 6), torch.randn(5)),
        {"dynamic": True},
    ),
    "symbolic gradients": (
        lambda x: x.softmax(1).cumsum(0),
        (torch.randn(4, 6),),
        {"dynamic": True, "grad": True},
    ),
    "symbolic window": (
        lambda x: x.unfold(0, 2, 1) * 1 if x.shape[0] > 3 else x,
        (torch.randn(7),),
        {"dynamic": True},
    ),
    "views of inputs": (lambda x: (x.t(), x[1:], x.expand(2, 3, 4)), (torch.randn(3, 4),), {}),
    "numbers": (lambda x, n: (x.view(n, -1), n * 3, None, 1.5), (torch.randn(6), 2), {}),
    "call into PyTorch": (lambda x: first(x * 2) + 1, (torch.rand(5),), {"torch_calls": True}),
    "draws": (lambda x: _weights(x), (torch.randn(4, 2),), {"torch_calls": True, "seed": 3}),
    "complex": (lambda x: torch.fft.rfft(x).abs(), (torch.randn(8),), {}),
    "library": (lambda x: x.sort(), (torch.randn(8),), {}),
    "assertion": (lambda x: torch._assert_async((x > -9).all()) or x + 1, (torch.randn(3),), {}),
    "half": (lambda x: x.exp() @ x, (torch.randn(4, 4).bfloat16(),), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_program_from_disk_does_what_it_did(case: str) -> None:
    fn, inputs, checks = CASES[case]
    assert_matches_eager(fn, *inputs, **checks)
    hits, misses = _counts()
    assert hits == 0
    assert misses > 0
    assert fx2relax.stats()["cache_skipped"] == {}
    before = {k: v for k, v in fx2relax.stats().items() if k.startswith(("tir", "lib", "nodes"))}
    fx2relax.reset_stats()
    assert_matches_eager(fn, *inputs, **checks)
    assert _counts() == (misses, 0)
    after = {k: v for k, v in fx2relax.stats().items() if k in before}
    assert after == before


_SCRIPT = """
import torch, fx2relax, sys
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
x = torch.randn(4, 6)
fast = torch.compile(net, backend="relax")
y = fast(x)
y.sum().backward()
torch.testing.assert_close(y, net(x))
print(fx2relax.stats()["cache_hits"], fx2relax.stats()["cache_misses"])
print(y.detach().tolist(), net[0].weight.grad.tolist())
print("tvm" in sys.modules)
"""


def _process() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _SCRIPT], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )


def test_processes_share_programs(store: Path) -> None:
    pair = [_process(), _process()]
    said = [process.communicate(timeout=600)[0].splitlines() for process in pair]
    assert [process.returncode for process in pair] == [0, 0]
    assert len(_programs(store)) == 2
    third = _process().communicate(timeout=600)[0].splitlines()
    assert third[0] == "2 0"
    assert third[1] == said[0][1] == said[1][1]
    assert [said[0][2], third[2]] == ["True", "False"]  # what was compiled needs no compiler


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + torch.tensor([1.0, 2.0, 3.0])


def _captured() -> tuple[torch.fx.GraphModule, list[Any]]:
    """A graph and its inputs as the backend sees them."""
    found: list[Any] = []
    original = graph_key.graph_key

    def keep(graph: Any, specs: Any, options: Any, helper: bool, tuned: str) -> str:
        found.append((graph, specs, options))
        return original(graph, specs, options, helper, tuned)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fx2relax.programs.graph_key", keep)
        _compiled(_scaled, torch.randn(4, 3))
    return found[0]


def test_each_ingredient_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, specs, options = _captured()

    def key() -> str:
        return graph_key.graph_key(graph, specs, options)

    start = key()
    assert key() == start
    seen = {start, graph_key.graph_key(graph, specs, options, tuned="for a second")}
    assert len(seen) == 2

    def other() -> None:
        assert key() not in seen
        seen.add(key())

    nodes = list(graph.graph.nodes)
    product = next(n for n in nodes if n.target is torch.ops.aten.mul.Tensor)
    product.args = (product.args[0], 3)
    other()
    product.args = (product.args[0], 2.0)
    other()
    product.args = (product.args[0], 2)
    product.target = torch.ops.aten.div.Tensor
    other()
    product.target = torch.ops.aten.mul.Tensor
    assert key() == start
    value = nodes[0].meta["val"]
    with value.fake_mode:
        others = [
            torch.empty(5, 3),
            torch.empty(4, 3, dtype=torch.float64),
            torch.empty(3, 4).t(),
            torch.empty(13)[1:].view(4, 3),
            torch.empty(4, 3, requires_grad=True),
        ]
    for changed in others:
        nodes[0].meta["val"] = changed
        other()
    nodes[0].meta["val"] = value
    held = next(n for n in nodes if n.op == "get_attr")
    with torch.no_grad():
        getattr(graph, held.target).add_(1)
    other()
    with torch.no_grad():
        getattr(graph, held.target).sub_(1)
    assert key() == start
    specs[0].kind = "parameter"
    other()
    specs[0].kind = "user"
    for change in ({"library": "none"}, {"on_unsupported": "raise"}):
        chosen = dataclasses.replace(options, **change)
        found = graph_key.graph_key(graph, specs, chosen)
        assert found not in seen
        seen.add(found)
    for name in ("cache", "never_slower"):
        assert graph_key.graph_key(graph, specs, dataclasses.replace(options, **{name: False})) == (
            start
        )
    for name in graph_key._STORE:
        with monkeypatch.context() as patch:
            patch.setenv(name, "7")
            assert key() == start
    monkeypatch.setenv("FX2RELAX_SWITCH", "1")
    other()
    monkeypatch.delenv("FX2RELAX_SWITCH")
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    other()
    torch.set_num_threads(threads)
    facts = graph_key._fixed_facts()
    for name in facts:
        monkeypatch.setattr(graph_key, "_fixed_facts", lambda name=name: {**facts, name: "other"})
        other()
    monkeypatch.setattr(graph_key, "_fixed_facts", lambda: facts)
    with fx2relax.overrides({torch.ops.aten.neg.default: lambda x: x}):
        other()
    assert key() == start


def test_sizes_that_are_symbolic_have_their_ranges_in_the_key() -> None:
    def fn(x: torch.Tensor, least: int) -> torch.Tensor:
        torch._check(x.shape[0] >= least)
        return x * 2

    _compiled(lambda x: fn(x, 2), torch.randn(9), dynamic=True)
    _compiled(lambda x: fn(x, 5), torch.randn(9), dynamic=True)
    assert _counts() == (0, 2)
    _compiled(lambda x: fn(x, 5), torch.randn(9), dynamic=True)
    assert _counts() == (1, 2)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "other version", "renamed"])
def test_a_damaged_program_is_compiled_again(
    store: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(4, 3)
    _compiled(_scaled, x)
    (path,) = _programs(store)
    good = path.read_bytes()
    bad = {
        "flipped": good[:-100] + bytes([good[-100] ^ 1]) + good[-99:],
        "truncated": good[: len(good) // 2],
        "empty": b"",
        "other version": good.replace(b"program 1", b"program 0", 1),
        "renamed": cache._packed(cache._unpacked(good, path.stem), "0" * 64),
    }[damage]
    path.write_bytes(bad)
    torch.testing.assert_close(_compiled(_scaled, x), _scaled(x))
    assert _counts() == (0, 2)
    assert [r.getMessage().count("compiled again") for r in caplog.records] == [1]
    caplog.clear()
    _compiled(_scaled, x)
    assert _counts() == (1, 2)
    assert caplog.records == []


def test_an_entry_that_says_nonsense_is_compiled_again(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(4, 3)
    _compiled(_scaled, x)
    (path,) = _programs(store)
    entry = cache._unpacked(path.read_bytes(), path.stem)
    del entry.said["imported"]["outputs"]
    path.write_bytes(cache._packed(entry, path.stem))
    torch.testing.assert_close(_compiled(_scaled, x), _scaled(x))
    assert "KeyError" in caplog.text
    assert _counts() == (0, 2)


@pytest.mark.parametrize("by", ["option", "environment"])
def test_off(store: Path, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if by == "environment":
        monkeypatch.setenv("FX2RELAX_CACHE", "0")
    _compiled(_scaled, torch.randn(4, 3), options={"cache": by != "option"})
    assert _counts() == (0, 0)
    assert not store.exists()


def test_the_folder_is_its_owners_alone(
    store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(4, 3)
    _compiled(_scaled, x)
    assert store.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in _programs(store))
    store.chmod(0o770)
    for _ in range(2):
        torch.testing.assert_close(_compiled(_scaled, x), _scaled(x))
    assert [r.getMessage().count("others may write") for r in caplog.records] == [1]
    assert _counts() == (0, 1)


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    store = cache.Store(tmp_path / "programs", limit=3500)
    entry = cache.Entry(bytes(1000), {})
    for age, key in enumerate("abc"):
        store.put(key, entry)
        os.utime(store._path(key), (age, age))
    assert store.get("a") is not None  # and is now the newest
    store.note("b", seconds=1)
    os.utime(store._notes("b"), (1, 1))
    store.put("d", entry)
    assert [p.stem for p in _programs(store.where)] == ["a", "c", "d"]
    assert store.notes("b") == {}
    store.put("e", cache.Entry(bytes(4000), {}))
    assert store.get("e") is None
    assert len(_programs(store.where)) == 3
    assert not list(store.where.glob("*.tmp"))


def test_limits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert cache.size_limit() == 1 << 30
    assert cache.size_limit(5) == 5
    monkeypatch.setenv("FX2RELAX_CACHE_SIZE", "20 MiB")
    assert cache.size_limit() == 20 << 20
    monkeypatch.setenv("FX2RELAX_CACHE_SIZE", "much")
    assert cache.size_limit() == 1 << 30
    assert "much" in caplog.text
    with pytest.raises(Exception, match="number of bytes"):
        _compiled(_scaled, torch.randn(4, 3), options={"cache_size": "1G"})


def test_a_users_converter_is_not_stored(store: Path) -> None:
    x = torch.rand(5)
    own = {torch.ops.aten.sin.default: lambda x: op.multiply(x, x)}
    for _ in range(2):
        got = _compiled(torch.sin, x, options={"call_function_map": own})
        torch.testing.assert_close(got, x * x)
    assert fx2relax.stats()["cache_skipped"] == {"a converter of the user's": 2}
    assert _programs(store) == []
    torch.testing.assert_close(_compiled(torch.sin, x), x.sin())


def test_a_call_kept_whole_is_not_stored(store: Path) -> None:
    own = {torch.sin: lambda x: op.multiply(x, x)}
    x = torch.rand(5)
    torch.testing.assert_close(_compiled(torch.sin, x, options={"call_function_map": own}), x * x)
    assert fx2relax.stats()["cache_skipped"] == {"a call that is kept whole": 1}


def test_literals() -> None:
    values = [
        (1, 2.5, float("-inf"), None, True, "text", 1 + 2j),
        [torch.float16, torch.strided, torch.channels_last, torch.device("cpu")],
        {"a": slice(None, 3), 2: torch.ops.aten.add.Tensor},
    ]
    assert decode(encode(values)) == values
    assert encode(float("nan")) == {"float": "nan"}
    with pytest.raises(NoSpelling, match="type object"):
        encode([object()])
    for text in ({"what": 1}, {"torch": "nn"}, {"op": "aten.add"}, {"a": 1, "b": 2}):
        with pytest.raises((ValueError, AttributeError)):
            decode(text)
