"""`fx2relax explain` and `check`: what they print, write and exit with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import fx2relax
from fx2relax.checking import Checked, Failed, Wrong
from fx2relax.cli import main
from fx2relax.explaining.report import Line, Node

MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(16, 32)

    def forward(self, x, *, scale=1.0):
        return torch.nn.functional.gelu(self.first(x)) * scale

def net():
    torch.manual_seed(0)
    return Net(), {"x": torch.randn(5, 16), "scale": 2.0}
"""


@pytest.fixture
def model(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "told.py").write_text(MODEL, encoding="utf-8")
    threads = torch.get_num_threads()
    yield f"{tmp_path / 'told.py'}:net"
    torch.set_num_threads(threads)
    torch._dynamo.reset()


def test_explain_prints_lines_and_kernels(model: str) -> None:
    done = CliRunner().invoke(main, ["explain", model, "--seconds", "0.1", "--threads", "1"])
    assert done.exit_code == 0, done.output
    assert "Net: 1 graph" in done.output
    assert "told.py:10" in done.output
    assert "kernels of inference 0" in done.output


def test_explain_as_json_and_as_a_file(model: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["explain", model, "--no-measure", "--json", "--grad"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.output)
    assert [graph["phase"] for graph in said["graphs"]] == ["forward", "backward"]
    assert said["call"] is None
    page = tmp_path / "report.html"
    done = CliRunner().invoke(main, ["explain", model, "--no-measure", "--out", str(page)])
    assert done.exit_code == 0, done.output
    assert "told.py:10" in page.read_text(encoding="utf-8")


def test_check_says_that_all_is_right(model: str) -> None:
    done = CliRunner().invoke(main, ["check", model, "--grad", "--library", "none"])
    assert done.exit_code == 0, done.output
    assert "all right" in done.output
    said = json.loads(CliRunner().invoke(main, ["check", model, "--json"]).output)
    assert said["right"]
    assert said["kernels"] >= 1


def test_check_fails_where_a_kernel_is_wrong(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    node = Node("gelu", "aten.gelu.default", Line("told.py", 10, "return gelu"))
    wrong = Wrong("inference 0", "torch", 3, "fused_gelu", [node], 0.5, "1.0 at [0], and not 2.0")
    found = Checked([wrong], 4, 0, 1)
    monkeypatch.setattr(fx2relax, "check", lambda *a, **k: found)
    done = CliRunner().invoke(main, ["check", model, "--reproduce", str(tmp_path / "scripts")])
    assert done.exit_code == 1
    assert "kernel 3, fused_gelu of inference 0" in done.output
    assert "gelu = aten.gelu.default   told.py:10  return gelu" in done.output
    done = CliRunner().invoke(main, ["check", model, "--json"])
    assert done.exit_code == 1
    assert json.loads(done.output)["wrong"][0]["nodes"][0]["name"] == "gelu"


def test_check_fails_where_a_graph_cannot_be_compiled(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Checked([], 0, 0, 0, [Failed("inference 0", "ValueError: no")])
    monkeypatch.setattr(fx2relax, "check", lambda *a, **k: found)
    done = CliRunner().invoke(main, ["check", model])
    assert done.exit_code == 1
    assert "inference 0 runs in PyTorch: ValueError: no" in done.output
    done = CliRunner().invoke(main, ["check", model, "--json"])
    assert done.exit_code == 1
    said = json.loads(done.output)
    assert (said["right"], said["wrong"]) == (False, [])
    assert said["failed"] == [{"graph": "inference 0", "reason": "ValueError: no"}]


@pytest.mark.parametrize("command", ["explain", "check"])
def test_there_is_no_such_model(command: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, [command, str(tmp_path / "none.py:net")])
    assert done.exit_code == 2
    assert "there is no file" in done.output


@pytest.mark.parametrize("command", ["explain", "check"])
def test_eager_does_not_run_the_model(command: str, tmp_path: Path) -> None:
    file = tmp_path / "misfit.py"
    file.write_text(
        "import torch\ndef net():\n    return torch.nn.Linear(3, 4), torch.ones(2, 5)\n"
    )
    done = CliRunner().invoke(main, [command, f"{file}:net"])
    assert done.exit_code == 2
    said = " ".join(done.output.replace("│", " ").split())
    assert "does not run in eager: RuntimeError: mat1 and mat2 shapes cannot be" in said


@pytest.mark.parametrize("command", ["explain", "check", "bench", "tune"])
def test_no_function_is_named(command: str, model: str) -> None:
    file = model.removesuffix(":net")
    for named in (file, f"{file}:", f"{file}:nett"):
        done = CliRunner().invoke(main, [command, named])
        assert done.exit_code == 2, done.output
        said = " ".join(done.output.split())
        assert f"those that take nothing are {file}:net" in said
    done = CliRunner().invoke(main, [command, file])
    assert "it takes FILE.py:function" in done.output


def test_a_file_without_functions(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text("def net(x):\n    return x\n", encoding="utf-8")
    done = CliRunner().invoke(main, ["check", str(tmp_path / "bare.py")])
    assert done.exit_code == 2
    assert "write one that returns (module, inputs)" in " ".join(done.output.split())
    (tmp_path / "bare.py").write_text("def net(:\n", encoding="utf-8")
    done = CliRunner().invoke(main, ["check", str(tmp_path / "bare.py")])
    assert done.exit_code == 2
    assert "it is no Python file: invalid syntax" in " ".join(done.output.split())
