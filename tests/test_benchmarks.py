"""The benchmarks build what they say, run two sides end to end, and report what went wrong."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import benchmarks_found  # noqa: F401
import pytest
import torch
from click.testing import CliRunner
from torch.utils import _pytree as pytree

from benchmarks import figures, floor, memory, tables
from benchmarks.__main__ import main
from benchmarks.agreement import TOLERANCE, as_exact, errors
from benchmarks.cases import CASES, KERNELS, NETWORKS, TRAINED
from benchmarks.driver import Driver, _judge, groups
from benchmarks.results import Cell, Group, Results, environment
from benchmarks.sides import SIDES, split

#: The first output's shape with a batch of one, and millions of weights.
SHAPES = {
    "resnet18": ((1, 1000), 11.69),
    "resnet50": ((1, 1000), 25.56),
    "mobilenetv3": ((1, 1000), 5.48),
    "efficientnet-b0": ((1, 1000), 5.29),
    "convnext-tiny": ((1, 1000), 28.59),
    "unet": ((1, 3, 128, 128), 1.83),
    "vit-small": ((1, 1000), 22.05),
    "bert": ((1, 128, 768), 52.78),
    "gpt2": ((1, 1, 50257), 124.44),
    "whisper-encoder": ((1, 1500, 384), 8.21),
    "gpt2-decode": ((1, 50257), 124.44),
    "llama-decode": ((1, 32000), 124.67),
    "llama-long": ((1, 32000), 124.67),
    "lstm": ((1, 5), 5.19),
    "dlrm": ((1, 1), 5.13),
    "mlp": ((1, 10), 0.67),
}


def test_every_network_has_its_shape_here():
    assert set(SHAPES) == set(NETWORKS)
    assert set(TRAINED) <= set(NETWORKS)


@pytest.mark.parametrize("name", list(NETWORKS))
def test_a_network_runs_in_eager(name, monkeypatch):
    # The values of the weights cost more than the network itself, and do not matter here.
    for fill in ("normal_", "uniform_"):
        monkeypatch.setattr(torch.Tensor, fill, lambda self, *args, **kwargs: self.zero_())
    model, args = NETWORKS[name].build(1)
    with torch.no_grad():
        first = pytree.tree_leaves(model(*args))[0]
    shape, millions = SHAPES[name]
    assert tuple(first.shape) == shape
    assert sum(w.numel() for w in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)
    assert not model.training


@pytest.mark.parametrize("name", list(KERNELS))
def test_a_kernel_runs_in_eager(name):
    model, args = KERNELS[name].build(1)
    assert model(*args).numel() > 0


def test_a_case_is_the_same_in_every_process():
    one, two = (NETWORKS["mlp"].build(1) for _ in range(2))
    assert all(map(torch.equal, one[0].state_dict().values(), two[0].state_dict().values()))
    assert torch.equal(one[1][0], two[1][0])


def test_decoding_reads_and_writes_its_cache():
    """The in-place cache holds the token's keys where it was told to; the mask hides the rest."""
    from benchmarks.networks.decode import LlamaDecode

    torch.manual_seed(0)
    model = LlamaDecode(2, layers=1, width=32, heads=4, shared=2, hidden=48, length=8).eval()
    layer = model.layers[0]
    before = layer.keys.clone()
    token, position = torch.tensor([3, 4]), torch.tensor([5])
    with torch.no_grad():
        first = model(token, position)
        assert (layer.keys != before).any((0, 1, 3)).tolist() == [i == 5 for i in range(8)]
        layer.keys[:, :, 6:] = 9.0
        layer.values[:, :, 6:] = 9.0
        assert torch.equal(model(token, position), first)
        layer.values[:, :, 4] += 1.0
        assert not torch.allclose(model(token, position), first)


def test_errors():
    x = torch.tensor([1.0, -4.0, math.nan, math.inf])
    assert errors([x], [x]) == (0.0, 0.0)
    assert errors([x + torch.tensor([0.0, 2.0, 0.0, 0.0])], [x]) == (2.0, 0.5)
    for wrong in (x.nan_to_num(nan=0.0), x.clamp(max=9.0), x.double(), x[:2]):
        assert errors([wrong], [x]) == (math.inf, math.inf)
    assert errors([], [x]) == (math.inf, math.inf)
    whole = torch.tensor([1, 2])
    assert errors([whole], [whole]) == (0.0, 0.0)
    assert errors([whole + 1], [whole])[1] == math.inf
    # A gradient that is zero but for rounding is held to the scale of the others.
    assert errors([torch.ones(2), torch.tensor([2e-9])], [torch.ones(2), torch.tensor([1e-9])])[
        1
    ] == pytest.approx(1e-7)


def test_what_is_as_uncertain_in_eager_is_no_error():
    exact = [torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([3])]
    eager = [torch.tensor([1.0, 2.01]), torch.tensor([3])]
    assert as_exact([torch.tensor([1.0, 1.97]), torch.tensor([3])], eager, exact)
    assert not as_exact([torch.tensor([1.0, 1.95]), torch.tensor([3])], eager, exact)
    assert not as_exact([torch.tensor([1.0, 2.0]), torch.tensor([4])], eager, exact)


def test_a_wrong_result_is_marked():
    cell, error = Cell(), 0.02
    _judge(cell, {"absolute": 0.1, "relative": error, "right": error <= TOLERANCE["inference"]})
    assert (cell.status, cell.relative) == ("wrong", 0.02)
    group = _group("bert", {"eager": 10.0, "inductor": 8.0, "relax": 4.0})
    group.cells["relax"] = cell
    cell.ms = 4.0
    results = Results(environment([]), groups=[group])
    assert figures.ratio(group, "inductor") is None
    against = next(f for f in figures.summary(results) if f.what == "networks, against inductor")
    assert against.met is False
    assert "wrong [1]" in tables.markdown(results)
    assert "[1] relax: off by 2.0e-02 of the largest value" in tables.markdown(results)


def test_options_of_a_column():
    assert split("relax library=none never_slower=False") == (
        "relax",
        {"library": "none", "never_slower": False},
    )
    with pytest.raises(ValueError, match="has no value"):
        split("relax library")


def test_groups():
    names = ["bert", "mlp", "softmax"]
    found = [g.name for g in groups(["inference"], names, None, [1, 2])]
    assert len(found) == 4 + 4 + 2
    assert {"bert b8 t2", "mlp b64 t1", "softmax b1 t2"} <= set(found)
    assert [g.name for g in groups(["train", "autocast"], names, [8], [1])] == [
        "bert b8 t1",
        "bert b8 t1",
        "mlp b1 t1",
    ]


def test_memory():
    block = bytearray(64 * 2**20)
    with_block = memory.peak()
    assert with_block >= 64
    assert memory.held() > 0
    assert memory.children_peak() >= 0
    del block
    memory.reset_peak()
    assert memory.peak() <= with_block


def test_two_sides_end_to_end(tmp_path, monkeypatch):
    """A network, eager and ours; a column with an option that there is not fails, and says why."""
    arguments = ["--networks", "mlp", "--sides", "eager,relax"]
    arguments += ["--options", "library=nothing", "--batch", "1", "--threads", "1", "--no-cold"]
    arguments += ["--rounds", "3", "--seconds", "0.05", "--out", str(tmp_path)]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    results = Results.load(tmp_path / "results.json")
    (group,) = results.groups
    ours, other = group.cells["relax"], group.cells["relax library=nothing"]
    assert (ours.status, other.status) == ("ok", "failed")
    assert len(ours.rounds) == 3
    assert ours.ms > 0
    assert ours.warm_s > 0
    assert 0 <= ours.relative < 1e-4
    assert ours.memory["peak"] >= ours.memory["loaded"] > 0
    assert ours.notes["stats"]["nodes_fallback"] == 0
    assert "OptionError" in other.reason
    assert set(results.first_use) == {"eager", "relax"}
    assert (tmp_path / "latency-networks.png").stat().st_size > 1000
    assert "OptionError" in (tmp_path / "table.md").read_text()
    # What is there is not written over unless one says so, and then not run again.
    assert CliRunner().invoke(main, arguments).exit_code == 2
    monkeypatch.setattr(Driver, "run", lambda self, group: pytest.fail("it ran again"))
    monkeypatch.setattr(Driver, "prime", lambda self: pytest.fail("it ran again"))
    again = CliRunner().invoke(main, [*arguments, "--resume"], catch_exceptions=False)
    assert again.exit_code == 0
    assert Results.load(tmp_path / "results.json") == results


def _cell(ms: float, **more: object) -> Cell:
    kept = {"imported": 300.0, "loaded": 400.0, "peak": 100 * ms, "held": 90 * ms, "weights": 40.0}
    kept["cold_peak"] = 100.0
    given = {"ms": ms, "rounds": [ms, ms, 1.1 * ms, ms], "cold_s": 9 * ms, "warm_s": ms, **more}
    return Cell(memory=kept, relative=0.0, **given)


def _group(case: str, ms: dict[str, float], mode: str = "inference", kind: str = "network"):
    return Group(mode, kind, case, 1, 2, {side: _cell(each) for side, each in ms.items()})


def _use(**seconds: float) -> dict[str, dict[str, float]]:
    return {side: {"seconds": each, "held": 200.0} for side, each in seconds.items()}


@pytest.fixture
def fixed(tmp_path):
    """Results whose figures are known."""
    results = Results(environment(["--quick"]), _use(inductor=20.0, relax=2.0))
    results.put(_group("bert", {"eager": 16.0, "inductor": 8.0, "relax": 4.0}))
    results.put(_group("mlp", {"eager": 4.0, "inductor": 1.0, "relax": 2.0}))
    results.groups[0].cells["openvino"] = Cell("missing", "not installed: openvino")
    results.groups[1].cells["openvino"] = Cell("failed", "RuntimeError: a | b")
    results.groups[0].cells["relax"].notes["fallbacks"] = ["2 x aten.celu.default"]
    results.groups[0].cells["relax library=none"] = _cell(5.0)
    results.put(_group("softmax", {"eager": 3.0, "inductor": 1.5, "relax": 1.0}, kind="kernel"))
    results.put(_group("bert", {"eager": 9.0, "inductor": 6.0, "relax": 5.0}, mode="train"))
    results.put(_group("bert", {"eager": 9.0, "inductor": 6.0, "relax": 7.0}, mode="autocast"))
    path = tmp_path / "in" / "results.json"
    results.save(path)
    return path


def test_figures(fixed):
    found = {f.what: f for f in figures.summary(Results.load(fixed))}
    assert found["networks, against inductor"].value == (
        "1.00 times faster; least 0.50, mlp b1 t2; 2 cells"
    )
    assert found["networks, against inductor"].met is False
    assert found["networks, against eager"].met is True
    assert found["networks, against openvino"].value == "no cell with both"
    assert found["kernels, against inductor"].met is True
    assert found["training steps, against inductor"].met is True
    assert found["networks, bfloat16 autocast, against inductor"].met is False
    assert found["cold compile, of inductor's"].value == "0.67 (54.0 s of 81.0 s); 2 cells"
    assert found["peak memory, of inductor's"].value == "mean 1.00; most 2.00, mlp b1 t2; 2 cells"
    first = found["peak memory of a first process, of inductor's"]
    assert (first.value, first.met) == ("mean 1.00; most 1.00, bert b1 t2; 2 cells", True)
    assert found["relax library=none, time of relax's"].met is True


def test_tables_and_plots_from_a_file(fixed, tmp_path):
    done = CliRunner().invoke(
        main, ["--from", str(fixed), "--out", str(tmp_path / "out")], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    assert "Latency: networks" in done.output
    text = (tmp_path / "out" / "table.md").read_text()
    assert "| bert | 1 | 2 | 16 (4.00x) | 8 (2.00x) | - [1] | 4 [2] | 5 (1.25x) | 8% |" in text
    assert "[2] relax: runs in PyTorch: 2 x aten.celu.default" in text
    assert "[1] openvino: not installed: openvino" in text
    assert "[3] openvino: RuntimeError: a | b" in text
    assert "python -m benchmarks --quick" in text
    assert "| bert | 1 | 4.00 | 2.00 | - |\n| mlp | 1 | 2.00 | 0.50 | - |" in text
    assert "| geometric mean |  | 2.83 | 1.00 | - |" in text
    assert "| inference | bert | 1 | 2 | 100 / 1600 / 1440 | 100 / 800 / 720 (13.0w) |" in text
    drawn = {path.stem for path in (tmp_path / "out").glob("*.png")}
    assert drawn == {
        "latency-networks",
        "latency-kernels",
        "latency-train",
        "latency-autocast",
        "compile-cold",
        "compile-warm",
        "memory",
    }
    assert all(f"]({name}.png)" in text for name in drawn)


def test_a_file_of_another_version_is_refused(tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"version": 0}))
    done = CliRunner().invoke(main, ["--from", str(path), "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "another version" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--networks", "vgg"], "'vgg' is not one of resnet18"),
        (["--threads", "0"], "not a list of positive numbers"),
        (["--options", "library"], "has no value"),
        (["--train", "--networks", "mlp"], "nothing to run"),
    ],
)
def test_wrong_arguments(arguments, message):
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert message in done.output


def test_sides():
    assert list(SIDES) == [
        "eager",
        "dynamo",
        "inductor",
        "inductor-freezing",
        "inductor-reduce-overhead",
        "openvino",
        "relax_dynamo",
        "relax",
        "relax-reduce-overhead",
    ]
    elsewhere = {name for name, side in SIDES.items() if "cuda" not in side.devices}
    assert elsewhere == {"inductor-freezing", "openvino", "relax_dynamo"}
    assert not SIDES["relax"].missing


def test_another_dtype(tmp_path):
    """Weights and arguments in bfloat16; the other sides of a GPU are none of a processor's."""
    arguments = ["--networks", "mlp", "--sides", "eager,relax,relax-reduce-overhead"]
    arguments += ["--dtype", "bfloat16", "--batch", "1", "--threads", "1", "--no-cold"]
    arguments += ["--rounds", "1", "--seconds", "0.05", "--out", str(tmp_path)]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    results = Results.load(tmp_path / "results.json")
    (group,) = results.groups
    assert {name: cell.status for name, cell in group.cells.items()} == {
        "eager": "ok",
        "relax": "ok",
    }
    found = results.environment
    assert (found["device"], found["dtype"], found["gpus"]) == ("cpu", "bfloat16", None)
    plain = sum(p.nbytes for p in CASES["mlp"].build(1)[0].parameters()) / 2**20
    assert group.cells["relax"].memory["weights"] == pytest.approx(plain / 2)


def test_no_gpu_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(main, ["--device", "cuda", "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert "finds no GPU" in done.output
    script = Path(__file__).parent.parent / "benchmarks" / "gpu.sh"
    env = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, env=env)
    assert done.returncode == 1
    assert "needs an NVIDIA GPU" in done.stderr


def test_the_floor_of_a_decoder():
    cells = {
        "eager": Cell(ms=4.0, memory={"weights": 1000.0}),
        "relax": Cell("failed", "no reason"),
    }
    group = Group("inference", "network", "llama-decode", 1, 1, cells)
    other = Group("inference", "network", "bert", 1, 1, cells)
    found = floor.lines(Results({"dtype": "float16"}, groups=[group, other]), 524.288)
    assert [line.partition("float16")[2].split(maxsplit=1) for line in found] == [
        ["eager", "4.000 ms, floor 2.000 ms, x 2.00"],
        ["relax", "failed: no reason"],
    ]
    assert all(line.startswith("llama-decode b1 ") for line in found)
