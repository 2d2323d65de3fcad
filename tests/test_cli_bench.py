"""`fx2relax bench`: a user's model, what it says of it, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from fx2relax.cli import main
from fx2relax.demo import sides

MODELS = """
import torch
from helper import WIDTH

def tensor():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 16), torch.nn.GELU()), torch.randn(3, WIDTH)

def several():
    return (lambda x, y: {"sum": x + y, "of": (x * 2, 7)}), [torch.randn(3), torch.randn(3)]

class Named(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x, *, scale):
        self.seen += x
        x.mul_(scale)
        return self.seen + 1

def named():
    return Named(), {"x": torch.ones(3), "scale": 2.0}

class Wrong(torch.nn.Module):
    def forward(self, x):
        return x + (1e-3 if torch.compiler.is_compiling() else 0)

def wrong():
    return Wrong(), torch.randn(3)

class Fails(torch.nn.Module):
    def forward(self, x):
        if torch.compiler.is_compiling():
            raise ValueError("not compiled")
        return x

def fails():
    return Fails(), torch.randn(3)

def number():
    return 3

def raises():
    raise ValueError("there is no data")

def leaves():
    raise SystemExit(0)

def misfit():
    return torch.nn.Linear(3, 4), torch.randn(2, 5)

def empty():
    return (lambda x: x * 2), torch.randn(0, 3)

def talks():
    print("hello")
    return tensor()

class Held:
    def __init__(self, kept, name):
        self.kept, self.name = [kept], name

def held():
    def adds(x, held):
        held.kept[0].add_(x)
        return Held(x * 2, "a")

    return adds, (torch.randn(3), Held(torch.zeros(3), "b"))
"""


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


@pytest.fixture
def models(tmp_path: Path) -> str:
    (tmp_path / "helper.py").write_text("WIDTH = 8\n")
    (tmp_path / "my models.py").write_text(MODELS)
    sys.modules.pop("helper", None)
    return str(tmp_path / "my models.py")


def _bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "--seconds", "0", *arguments])


@pytest.mark.parametrize("function", ["tensor", "several", "named"])
def test_a_model(models: str, function: str) -> None:
    result = _bench(f"{models}:{function}", "--json", "--threads", "1")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["right"] is True
    assert said["threads"] == 1
    eager, relax = said["sides"]
    assert (eager["name"], relax["name"]) == ("eager", "relax")
    assert relax["ms"] >= relax["least_ms"] > 0
    assert relax["compile_seconds"] > 0
    assert relax["error"] < 1e-5
    assert relax["stats"]["graphs"] == 1


def test_objects_are_looked_into(models: str) -> None:
    assert _bench(f"{models}:held").exit_code == 0
    nan = float("nan")
    found = sides.leaves(({"a": nan}, _Object([1, torch.ones(2)]), len))
    assert [type(x) for x in found] == [float, int, torch.Tensor]
    for more in (0.0, 1.0):

        def adds(x: torch.Tensor, held: _Object, more: float = more) -> _Object:
            held.kept[0].add_(more if torch.compiler.is_compiling() else 0)
            return _Object([x, nan])

        bench = sides.Bench(adds, (torch.ones(3), _Object([torch.ones(2)])))
        bench.reference()
        side = bench.compiled("relax")
        assert bool(side.wrong) == bool(more), side
        assert not side.failed


class _Object:
    def __init__(self, kept: list[Any]) -> None:
        self.kept = kept


def test_the_table(models: str) -> None:
    result = _bench(f"{models}:tensor", "--threads", "1")
    assert result.exit_code == 0, result.output
    for text in ("eager", "relax", "ratio", "1 graphs", "threads: 1"):
        assert text in result.stdout
    assert "\r" not in result.output


@pytest.mark.filterwarnings("ignore")  # of Inductor's own imports
def test_another_dtype_and_inductor(models: str) -> None:
    result = _bench(f"{models}:tensor", "--dtype", "bfloat16", "--inductor", "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert [side["name"] for side in said["sides"]] == ["eager", "relax", "inductor"]
    assert 0 <= said["sides"][1]["error"] < 0.1


def test_a_wrong_result_ends_with_1(models: str) -> None:
    result = _bench(f"{models}:wrong")
    assert result.exit_code == 1
    assert "WRONG relax" in result.stdout
    assert "3 of 3 values" in result.stdout
    said = json.loads(_bench(f"{models}:wrong", "--json").stdout)
    assert said["right"] is False
    assert said["sides"][1]["error"] == pytest.approx(1e-3, rel=0.01)


def test_a_side_that_fails_ends_with_1(models: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.compile

    def broken(model: object, **options: object) -> object:
        if options["backend"] == "inductor":
            raise RuntimeError("no C++ compiler")
        return real(model, **options)

    monkeypatch.setattr(torch, "compile", broken)
    result = _bench(f"{models}:tensor", "--inductor")
    assert result.exit_code == 1
    assert "FAILED inductor" in result.stdout
    assert "RuntimeError: no C++ compiler" in result.stdout
    said = json.loads(_bench(f"{models}:tensor", "--inductor", "--json").stdout)
    assert said["sides"][2]["ms"] is None


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("nowhere.py:f", "no file"),
        ("nowhere.py", "FILE.py:function"),
        ("MODELS:nothing", "no function"),
        ("MODELS:number", "returns int"),
        ("MODELS:raises", "fails: ValueError: there is no data, at MODELS:45"),
        ("MODELS:leaves", "fails: SystemExit: 0, at MODELS:48"),
        ("MODELS:misfit", "does not run in eager: RuntimeError: mat1 and mat2 shapes cannot be"),
        ("FOLDER/broken.py:f", "broken.py cannot be imported: SyntaxError: "),
        ("FOLDER/needs.py:f", "No module named 'nosuch', at FOLDER/needs.py:2"),
    ],
)
def test_what_is_no_model_ends_with_2(models: str, named: str, why: str) -> None:
    folder = Path(models).parent
    (folder / "broken.py").write_text("def f(:\n")
    (folder / "needs.py").write_text("\nimport nosuch\n")

    def placed(text: str) -> str:
        return text.replace("MODELS", models).replace("FOLDER", str(folder))

    for command in ("bench", "tune"):
        result = CliRunner().invoke(main, [command, "--seconds", "0", placed(named)])
        assert result.exit_code == 2, result.output
        assert placed(why) in result.stderr
        assert result.stdout == ""


def test_what_a_model_prints_is_not_in_the_json(models: str) -> None:
    result = _bench(f"{models}:talks", "--json")
    assert json.loads(result.stdout)["right"] is True
    assert "hello" in result.stderr


def test_progress_is_on_the_error_stream_of_a_terminal(models: str) -> None:
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    code = "from fx2relax.cli import main; main()"
    command = [sys.executable, "-c", code, "bench", f"{models}:tensor", "--seconds", "0", "--json"]
    env = {**os.environ, "TERM": "xterm"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env=env, timeout=300)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # its end
        while part := os.read(ours, 1 << 16):
            shown += part
    os.close(ours)
    assert done.returncode == 0
    assert json.loads(done.stdout)["right"] is True
    assert b"timing in turns" in shown


def test_no_elements(models: str) -> None:
    done = _bench(f"{models}:empty", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)
