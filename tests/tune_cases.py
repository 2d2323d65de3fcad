"""What the tests of tuning have in common: a small network, its kernels, databases, processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fx2relax
from fx2relax import compat, disk, stages
from fx2relax.pipeline import spaces, tuned
from fx2relax.pipeline.target import host_target
from fx2relax.runtime import native
from fx2relax.tuning.database import Database
from fx2relax.tuning.kernels import Collector, Kernel

MODEL = """
import torch

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(48, 64), torch.nn.GELU(), torch.nn.Softmax(1)
    ).eval(), torch.randn(32, 48)
"""


MAIN = "from fx2relax.cli import main; main()"


def usual_environment() -> dict[str, str]:
    """A process with the usual folder of this package, where its helper is, and no programs."""
    given = {k: v for k, v in os.environ.items() if k != "FX2RELAX_CACHE_DIR"}
    return {**given, "FX2RELAX_CACHE": "0"}


def network() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Softmax(1)).eval()
    return net, torch.randn(32, 48)


def lowered() -> Collector:
    """The product and the softmax, as kernels without schedules."""
    net, x = network()
    module = fx2relax.from_fx(torch.fx.symbolic_trace(net), [(tuple(x.shape), "float32")])
    module, _ = compat.relax.frontend.detach_params(module)
    collector = Collector()
    with stages.observed(collector):
        fx2relax.pipeline.lower(module, library="none")
    return collector


def named(collector: Collector, part: str) -> Kernel:
    return next(k for k in collector.kernels.values() if part in k.name)


def recorded(kernel: Kernel, **more: Any) -> dict[str, Any]:
    return {"kernel": kernel.key, "digest": "d", "own": 1.0, "ratio": 0.5, "accepted": True, **more}


def another(kernel: Kernel, target: Any) -> spaces.Candidate:
    """A schedule that is not our own."""
    own = tuned.digest_of(tuned.own(kernel.func, target))
    space = spaces.Space(kernel.func, target, "another")
    for _ in range(50):
        drawn = space.draw([])
        if drawn is not None and drawn.digest != own:
            return drawn
    raise AssertionError("nothing was drawn")


def accepted(folder: Path, kernel: Kernel) -> spaces.Candidate:
    """Write down a schedule as if it had been measured to be fast."""
    target = host_target()
    drawn = another(kernel, target)
    database = Database(target, folder)
    database.add({"kernel": kernel.key, "name": kernel.name, "tir": tuned.spelled(kernel.func)})
    database.add(recorded(kernel, digest=drawn.digest, how=drawn.how))
    return drawn


def graph_kernels(net: nn.Module, x: torch.Tensor) -> Collector:
    collector = Collector()
    with stages.observed(collector), torch.no_grad():
        torch.compile(net, backend="relax", options={"library": "none", "cache": False})(x)
    torch._dynamo.reset()
    return collector


def wait(condition: Any, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.05)


@pytest.fixture
def tuning_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    native.use()  # which is compiled once, and not for every folder
    monkeypatch.setenv("FX2RELAX_NEVER_SLOWER", "1")
    monkeypatch.setenv("FX2RELAX_BACKGROUND", "1")
    monkeypatch.setenv("FX2RELAX_CACHE", "1")
    monkeypatch.setenv("FX2RELAX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(disk, "_told", set())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    fx2relax.wait_for_compilation()
    torch.set_num_threads(threads)
    torch._dynamo.reset()
