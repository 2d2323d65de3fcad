"""The option `tune`, the command and the function: what was tuned runs only if it is faster."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tune_cases import MODEL, accepted, graph_kernels, network, usual_environment
from tune_cases import tuning_settings as tuning_settings

import fx2relax
from fx2relax import never_slower, rivals
from fx2relax.cli import main
from fx2relax.errors import OptionError
from fx2relax.options import Options
from fx2relax.pipeline.target import host_target
from fx2relax.tune_options import Tune
from fx2relax.tuning.database import Database

pytestmark = pytest.mark.usefixtures("tuning_settings")


# The option.


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        (60, r"it takes a dict such as {'seconds': 60}"),
        ({"second": 60}, "it takes seconds, database, tracker, key"),
        ({"seconds": -1}, "it takes a number of seconds"),
        ({"seconds": True}, "it takes a number of seconds"),
        ({"seconds": float("nan")}, "it takes a number of seconds"),
        ({"database": 3}, "it takes the path of a folder"),
        ({"database": __file__}, "it takes a folder"),
        ({"tracker": "somewhere"}, "it takes host:port"),
        ({"tracker": "somewhere:9190"}, "rpc_server --tracker HOST:PORT --key KEY"),
        ({"key": "rpi"}, "it takes host:port"),
    ],
)
def test_a_wrong_option_names_the_remedy(given: Any, remedy: str) -> None:
    with pytest.raises(OptionError, match=remedy):
        Options.make({"tune": given})


def test_options_and_modes() -> None:
    assert Options.make({}).tune is None
    assert Options.make({}, "reduce-overhead").tune is None
    assert Options.make({}, "max-autotune").tune == Tune(60.0)
    assert Options.make({}, "max-autotune-no-cudagraphs").tune == Tune(60.0)
    assert Options.make({"tune": {"seconds": 5}}, "max-autotune").tune == Tune(5.0)
    assert Options.make({"never_slower": False}, "max-autotune").tune is None
    with pytest.raises(OptionError, match="never_slower=True"):
        Options.make({"tune": {}, "never_slower": False})


def _entered(monkeypatch: pytest.MonkeyPatch) -> list[rivals.Entered]:
    entered: list[rivals.Entered] = []
    enter = rivals.enter
    monkeypatch.setattr(rivals, "enter", lambda *a: entered.append(enter(*a)) or entered[-1])
    return entered


def _settle(fast: Any, x: torch.Tensor, expected: torch.Tensor) -> None:
    """Call until all is compiled, tuned and chosen."""
    with torch.no_grad():
        for _ in range(4):
            for _ in range(8):
                torch.testing.assert_close(fast(x), expected)
            assert fx2relax.wait_for_compilation(300)


def test_a_known_schedule_is_swapped_in_if_it_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = network()
    expected = net(x).detach()
    for kernel in graph_kernels(net, x).kernels.values():
        accepted(tmp_path / "database", kernel)
    entered = _entered(monkeypatch)
    options = {"library": "none", "tune": {"seconds": 0, "database": tmp_path / "database"}}
    # Which one wins is no matter of a clock here.
    wins = [True]

    def verdict(self: never_slower.Contest, times: dict[str, list[float]]) -> str | None:
        names = self._alternatives.names
        return names[-wins[0]] if len(times[names[0]]) > 2 else None

    monkeypatch.setattr(never_slower.Contest, "_verdict", verdict)
    _settle(torch.compile(net, backend="relax", options=options), x, expected)
    assert entered[0].alternatives.names == ["tuned none"]
    # What won is found as it was compiled.
    torch._dynamo.reset()
    fx2relax.reset_stats()
    _settle(torch.compile(net, backend="relax", options=options), x, expected)
    assert entered[1].alternatives.names == ["tuned none"]
    assert fx2relax.stats()["cache_misses"] == 0
    # What lost is not made again: the database holds something new.
    Database(host_target(), tmp_path / "database").add({"kernel": "x", "digest": "y"})
    wins[0] = False
    for _ in range(2):
        torch._dynamo.reset()
        _settle(torch.compile(net, backend="relax", options=options), x, expected)
    assert entered[2].alternatives.names == entered[3].alternatives.names == ["torch"]
    assert entered[3].alternatives.later is None


def test_tuning_goes_on_while_the_first_program_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = network()
    entered = _entered(monkeypatch)
    options = {"tune": {"seconds": 2, "database": tmp_path}}
    fast = torch.compile(net, backend="relax", options=options)
    expected = net(x).detach()
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(x), expected)
    _settle(fast, x, expected)
    (one,) = entered
    assert one.alternatives.later is None
    known = Database(host_target(), tmp_path).read()
    assert sum(len(each.tried) for each in known.values()) >= 1
    # The next process, or what compiles it anew, begins with what was chosen.
    torch._dynamo.reset()
    state = Database(host_target(), tmp_path).state()
    _settle(torch.compile(net, backend="relax", options=options), x, expected)
    assert Database(host_target(), tmp_path).state() == state


def test_gradients_are_right_while_it_is_tuned(tmp_path: Path) -> None:
    net, x = network()
    x = x[:4]
    expected = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    options = {"tune": {"seconds": 0.5, "database": tmp_path}}
    fast = torch.compile(net, backend="relax", options=options)
    for _ in range(3):
        for _ in range(14):
            found = torch.autograd.grad(fast(x).square().sum(), list(net.parameters()))
            torch.testing.assert_close(found, expected)
        assert fx2relax.wait_for_compilation(300)


def test_a_process_ends_while_it_tunes(tmp_path: Path) -> None:
    script = """
        import torch, fx2relax, sys
        net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()).eval()
        x = torch.randn(8, 32)
        options = {"tune": {"seconds": 600, "database": sys.argv[1]}, "library": "torch"}
        fast = torch.compile(net, backend="relax", options=options)
        with torch.no_grad():
            for _ in range(12):
                fast(x)
        assert not fx2relax.wait_for_compilation(0), "there is nothing to interrupt"
        print("ends")
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script), str(tmp_path / "base")],
        env=usual_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")


# The command, and the function that it calls.


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    model = f"{tmp_path / 'model.py'}:net"
    command = ["tune", model, "--seconds", "2", "--threads", "1", "--database"]
    done = CliRunner().invoke(main, [*command, str(tmp_path / "base"), "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.output)
    assert said["tried"] >= 1
    assert {"name", "share", "own", "ratio", "how", "tried"} <= said["kernels"][0].keys()
    assert all(kernel["ratio"] <= 1 for kernel in said["kernels"])
    assert Path(said["database"]).parent == tmp_path / "base"
    assert "steps" not in said
    done = CliRunner().invoke(main, ["tune", model, "--seconds", "0", "--threads", "1"])
    assert done.exit_code == 0, done.output
    assert "nothing faster is known" in done.output
    assert str(tmp_path / "cache") in done.output.replace("\n", "")


def test_the_command_line_is_wrong(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["tune", str(tmp_path / "none.py:net")])
    assert done.exit_code == 2
    assert "there is no file" in done.output
    (tmp_path / "model.py").write_text(MODEL)
    model = f"{tmp_path / 'model.py'}:net"
    done = CliRunner().invoke(main, ["tune", model, "--tracker", "somewhere"])
    assert done.exit_code == 2
    assert "it takes host:port" in done.output


def test_a_report_tells_before_and_after(tmp_path: Path) -> None:
    net, x = network()
    for kernel in graph_kernels(net, x).kernels.values():
        accepted(tmp_path, kernel)
    found = fx2relax.tune(net, x, seconds=0, database=tmp_path, library="none")
    assert {kernel.ratio for kernel in found.kernels} == {0.5}
    assert found.before is not None
    assert found.after is not None
    assert "before" in str(found)


def test_a_database_that_cannot_be_written_is_told_of_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    model = f"{tmp_path / 'model.py'}:net"
    given = ["--seconds", "1", "--threads", "1", "--database", "/proc/nowhere"]
    done = CliRunner().invoke(main, ["tune", model, *given])
    assert done.exit_code == 1
    assert "the database cannot be used" in done.output
    assert "name another folder by --database" in done.output
