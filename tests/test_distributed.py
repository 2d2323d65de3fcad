"""Two processes that train together, by `torchrun`: what they compile does what eager does."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh_process import give_helper

from fx2relax import collectives
from fx2relax.errors import BuildFailure

HERE = Path(__file__).parent
#: The processes themselves end before, and say where they hang.
SECONDS = 900
Outcomes = Callable[[str, str], list[str]]


def _cases() -> list[str]:
    """The names of the cases, read from their files: they are not for this process to import."""
    return [
        node.name
        for name in ("distributed_parallel", "distributed_collectives", "distributed_other")
        for node in ast.parse((HERE / f"{name}.py").read_text()).body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(d, ast.Name) and d.id == "case" for d in node.decorator_list)
    ]


CASES = _cases()


def _run(folder: Path, device: str, cases: list[str]) -> str:
    """Run the cases in two processes; what they printed."""
    give_helper(folder / "cache")
    environment = {
        **os.environ,
        "FX2RELAX_CACHE": "1",
        "FX2RELAX_CACHE_DIR": str(folder / "cache"),
        "FX2RELAX_NEVER_SLOWER": "1",
        "FX2RELAX_BACKGROUND": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    if device == "cpu" and sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # a host's name may stand for no address
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            [*command, str(HERE / "distributed_worker.py"), str(folder), device, *cases],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return (folder / "output").read_text()


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Why a case failed, for each process: empty where it went well."""
    asked_for = {i.callspec.params["name"] for i in _rows(request.session)}
    done: dict[str, tuple[list[dict[str, str]], str]] = {}

    def outcome(device: str) -> tuple[list[dict[str, str]], str]:
        folder = tmp_path_factory.mktemp(device)
        printed = _run(folder, device, [name for name in CASES if name in asked_for])
        found = [folder / f"{rank}.json" for rank in range(2)]
        return [json.loads(f.read_text()) if f.exists() else {} for f in found], printed

    def of(name: str, device: str) -> list[str]:
        if device not in done:
            done[device] = outcome(device)
        said, printed = done[device]
        return [each.get(name, f"was not reached:\n{printed[-6000:]}") for each in said]

    return of


def _rows(session: pytest.Session) -> list[Any]:
    """The rows of the two tables below that this session is to run."""
    tables = test_two_processes, test_two_gpus
    return [i for i in session.items if getattr(i, "function", None) in tables]


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_two_processes(name: str, outcomes: Outcomes) -> None:
    for rank, why in enumerate(outcomes(name, "cpu")):
        assert not why, f"process {rank}: {why}"


@pytest.mark.sweep
@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize("name", CASES)
def test_two_gpus(name: str, outcomes: Outcomes) -> None:
    """By NCCL. Graphs on a GPU run in PyTorch, as a warning says."""
    for rank, why in enumerate(outcomes(name, "cuda")):
        assert not why, f"process {rank}: {why}"


c10d = torch.ops._c10d_functional


def test_inputs_that_are_waited_for() -> None:
    """Those that a collective may still write to, also through a view; none of the graph's own."""
    graph = torch.fx.Graph()
    a, b, c = (graph.placeholder(name) for name in "abc")
    made = graph.call_function(c10d.all_reduce.default, (a, "sum", "0"))
    graph.call_function(c10d.wait_tensor.default, (made,))
    flat = graph.call_function(torch.ops.aten.view.default, (b, [-1]))
    graph.call_function(c10d.wait_tensor.default, (flat,))
    graph.output((c,))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    assert collectives.waited_inputs(module) == [1]
    assert collectives.holds_collectives(module)


@pytest.mark.parametrize("name", ["isend", "irecv"])
def test_one_sided_calls_are_left_to_pytorch(name: str) -> None:
    graph = torch.fx.Graph()
    made = graph.call_function(
        getattr(c10d, name).default, (graph.placeholder("x"), 1, 0, "default")
    )
    graph.output((made,))
    with pytest.raises(BuildFailure, match="sends to one process"):
        collectives.refuse_one_sided(torch.fx.GraphModule(torch.nn.Module(), graph))


def test_operators_that_may_talk_to_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own do not; a user's may, where there are others."""

    def shared(target: object) -> bool:
        graph = torch.fx.Graph()
        graph.output(graph.call_function(target, (graph.placeholder("x"),)))
        return collectives.is_shared(torch.fx.GraphModule(torch.nn.Module(), graph))

    users = torch.ops.profiler._record_function_exit  # of no namespace that is known
    assert shared(c10d.wait_tensor)
    assert not shared(torch.ops.aten.sin.default)
    assert not shared(users)
    monkeypatch.setattr(collectives, "processes", lambda: 2)
    assert not shared(torch.ops.aten.sin.default)
    assert not shared(torch.sin)
    assert shared(users)
