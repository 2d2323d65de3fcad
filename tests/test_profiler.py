"""`torch.profiler` shows kernels by the nodes that they compute, and nothing is done without it."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fx2relax
from fx2relax import disk, stages

pytestmark = pytest.mark.usefixtures("fresh")


def _seen(function: Any, *arguments: Any) -> Counter[str]:
    """How often each name of ours is in the timeline of a call."""
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        function(*arguments)
    return Counter(e.name for e in prof.events() if e.name.startswith("fx2relax"))


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4), nn.Softmax(-1)).eval()


def test_kernels_are_shown_by_their_nodes() -> None:
    fast, x = torch.compile(_net(), backend="relax"), torch.randn(3, 8)
    with torch.no_grad():
        expected = fast(x)
        for _ in range(3):
            seen = _seen(fast, x)
            names = [name for name in seen if "gelu" in name.partition(" ")[2]]
            assert len(names) == 1, seen
            assert any("softmax" in name.partition("[")[2] for name in seen), seen
            assert {"fx2relax::rows_nt [t, addmm]", "fx2relax::rows_nt [t_1, addmm_1]"} <= set(seen)
            assert all(name.startswith("fx2relax::") and name.endswith("]") for name in seen), seen
        torch.testing.assert_close(fast(x), expected)


def test_equal_kernels_are_told_apart() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = (x @ w).sin() + 1
        return x

    fast = torch.compile(function, backend="relax", options={"library": "torch"})
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    fast(x, w)
    seen = _seen(fast, x, w)
    assert sum("sin" in name and "add" in name for name in seen) == 3, seen
    assert set(seen.values()) == {1}


def test_one_kernel_alone_is_shown() -> None:
    fast, x = torch.compile(lambda x: (x + 1).sin(), backend="relax"), torch.randn(16)
    fast(x)
    (name,) = _seen(fast, x)
    assert name.endswith("[add, sin]")
    torch.testing.assert_close(fast(x), (x + 1).sin())


def test_what_runs_in_pytorch_is_shown_by_its_operator() -> None:
    fast, x = torch.compile(lambda x: torch.linalg.eigvals(x + 1), backend="relax"), torch.eye(3)
    fast(x)
    assert any(name.startswith("fx2relax::aten.linalg_eig") for name in _seen(fast, x))


def test_gradients_are_shown() -> None:
    net, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(3, 8)
    fast = torch.compile(net, backend="relax")

    def step() -> None:
        fast(x).sum().backward()

    step()
    seen = _seen(step)
    assert any("tanh" in name for name in seen), seen
    assert len(seen) > 3


def test_compiling_is_shown() -> None:
    fast, x = torch.compile(_net(), backend="relax"), torch.randn(3, 8)
    with torch.no_grad():
        seen = _seen(fast, x)
    for stage in ("compile the inference graph", "import", "lower", "compile kernels"):
        assert f"fx2relax: {stage}" in seen, seen


def test_programs_from_the_disk_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FX2RELAX_CACHE", "1")
    monkeypatch.setenv("FX2RELAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(disk, "_told", set())
    net, x, shown = _net(), torch.randn(3, 8), []
    for _ in range(2):
        torch._dynamo.reset()
        fx2relax.reset_stats()
        fast = torch.compile(net, backend="relax")
        with torch.no_grad():
            fast(x)
            shown.append(_seen(fast, x))
    assert fx2relax.stats()["cache_hits"] == 1
    assert shown[0] == shown[1]
    assert any("gelu" in name for name in shown[0])


def test_another_machine_runs_while_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a profile a call is what it was before: its machine tells nobody of its calls."""
    programs: list[Any] = []

    class Watch:
        def note(self, stage: str, what: dict[str, Any]) -> None:
            if stage == "program":
                programs.append(what["program"])

        def wrap(self, call: Any, what: dict[str, Any]) -> Any:
            return call

    fast, x = torch.compile(_net(), backend="relax"), torch.randn(3, 8)
    with stages.observed(Watch()), torch.no_grad():
        fast(x)
    (program,) = programs
    assert program.call is not None
    told: list[str] = []
    with torch.no_grad():
        assert _seen(fast, x)
        from fx2relax.runtime import profiled

        monkeypatch.setattr(profiled._Shown, "begin", lambda self: told.append("begun"))
        fast(x)
    assert told == []


def test_an_error_while_a_profiler_runs() -> None:
    @torch.library.custom_op("fx2relax_tests::refuses", mutates_args=())
    def refuses(x: torch.Tensor) -> torch.Tensor:
        if x[0] > 0:
            raise ZeroDivisionError
        return x.clone()

    @refuses.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    fast = torch.compile(lambda x: torch.ops.fx2relax_tests.refuses(x + 1).sin(), backend="relax")
    good = torch.full((4,), -2.0)
    fast(good)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                fast(torch.ones(4))
            torch.testing.assert_close(fast(good), (good + 1).sin())
    names = Counter(e.name for e in prof.events() if "refuses" in e.name and "::" in e.name)
    assert max(names.values()) == 4, names


def test_each_thread_has_machines_of_its_own_for_a_profile() -> None:
    fast, x = torch.compile(_net(), backend="relax"), torch.randn(3, 8)
    with torch.no_grad():
        expected = fast(x)
    wrong: list[Any] = []

    def work() -> None:
        with torch.no_grad():
            for _ in range(50):
                if not torch.allclose(fast(x), expected):
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    with profile(activities=[ProfilerActivity.CPU]):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


@pytest.mark.parametrize("library", ["torch", "none"])
def test_the_kernels_of_networks_have_names(library: str) -> None:
    """Each call of a program is shown, and almost all with a node."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
            self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
            self.out = nn.Linear(16, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.relu(self.norm(self.conv(x)) + x)
            x = F.max_pool2d(x, 2).flatten(2)
            return self.out(self.attend(x, x, x)[0]).log_softmax(-1)

    fast = torch.compile(Block().eval(), backend="relax", options={"library": library})
    x = torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        fast(x)
        fx2relax.reset_stats()
        seen = _seen(fast, x)
    assert sum(seen.values()) >= 5
    assert sum(name.endswith("[]") for name in seen.elements()) <= 1, seen
