"""Exports, saved and loaded: the same numbers as eager, from files alone."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from networks import llama
from torch import nn

import fx2relax
from fx2relax import Dim, Tensor, deploy


class Model(nn.Module):
    """Two projections over shared weights, a cache that is written to, and nested arguments."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 16, bias=False)
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8)
        self.register_buffer("cache", torch.zeros(4, 8))
        self.register_buffer("calls", torch.ones((), dtype=torch.int64))

    def prefill(self, x):
        both = torch.cat([self.gate.weight, self.up.weight])
        gate, up = nn.functional.linear(x, both).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)

    def decode(self, x, *, past, scale=2.0, total=None):
        self.calls += 1
        self.cache.copy_(torch.cat([self.cache[1:], x.reshape(-1, 8)[:1]]))
        if total is not None:
            total.add_(1)
        y = self.prefill(x) * scale + past["a"][0]
        return {"y": y, "rows": x.shape[0], "sum": (self.cache.sum(), self.calls * 1), "no": None}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture(scope="module")
def exported(model):
    return fx2relax.export(
        model,
        {
            "prefill": {"x": Tensor((Dim("batch", 1, 16), "seq", 8))},
            "decode": {
                "x": Tensor((Dim("batch", 1, 16), 1, 8)),
                "past": {"a": [Tensor((8,))]},
                "scale": 3.0,
                "total": Tensor((2,)),
            },
        },
    )


@pytest.fixture(scope="module")
def artifact(exported, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "a"
    exported.save(folder)
    return deploy.load(folder)


def test_an_export_runs_from_its_folder(model, artifact):
    for batch, seq in ((1, 3), (2, 5)):
        x = torch.randn(batch, seq, 8)
        with torch.no_grad():
            np.testing.assert_allclose(artifact.prefill(x.numpy()), model.prefill(x), atol=1e-5)
    with pytest.raises(ValueError, match="'batch' is 17, and has to be at least 1 and at most 16"):
        artifact.prefill(np.zeros((17, 1, 8), np.float32))


def test_states_structures_and_written_arguments(model, artifact):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        for _ in range(2):
            x, past = torch.randn(3, 1, 8), torch.randn(8)
            total = torch.zeros(2)
            given = np.zeros(2, np.float32)
            with torch.no_grad():
                wanted = model.decode(x, past={"a": [past]}, scale=3.0, total=total)
            found = artifact.decode(x.numpy(), past={"a": [past.numpy()]}, total=given)
            assert found.keys() == wanted.keys()
            np.testing.assert_allclose(found["y"], wanted["y"], atol=1e-5)
            np.testing.assert_allclose(found["sum"][0], wanted["sum"][0], atol=1e-5)
            assert (found["rows"], int(found["sum"][1]), found["no"]) == (
                wanted["rows"],
                int(wanted["sum"][1]),
                None,
            )
            np.testing.assert_array_equal(given, total)
        np.testing.assert_array_equal(artifact.states["cache"], model.cache)
        artifact.reset()
        assert int(artifact.states["calls"]) == 1
    finally:
        model.load_state_dict(state)


def test_a_cache_of_zeros_takes_no_place_in_the_file(artifact):
    states = {state.name: state.zeros for state in artifact.manifest.states}
    assert states == {"cache": True, "calls": False}
    assert "cache" not in deploy.WeightFile(artifact._path / "weights.safetensors").entries


def test_weights_of_symbolic_sizes_serve_several_widths(tmp_path):
    class Widths(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 6)

        def forward(self, x):
            return self.fc(x)

    exported = fx2relax.export(
        Widths(),
        {"forward": {"x": Tensor(("rows", 4))}},
        weights={"fc.weight": ("n", 4), "fc.bias": ("n",)},
    )
    exported.build().save(tmp_path / "a", weights=False)
    artifact = deploy.load(tmp_path / "a")
    for width in (3, 6):
        other = nn.Linear(4, width)
        weights = {f"fc.{name}": value for name, value in other.state_dict().items()}
        artifact.weights.load_state_dict(weights)
        x = torch.randn(2, 4)
        np.testing.assert_allclose(artifact.forward(x), other(x).detach(), atol=1e-5)


def test_a_program_of_torch_export(tmp_path):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x, pair):
            return {"y": self.fc(x) * pair[0], "z": pair[1] + 1}

    model = Scaled().eval()
    rows = torch.export.Dim("rows", min=2, max=9)
    given = (torch.randn(5, 4), (torch.randn(3), torch.randn(5)))
    program = torch.export.export(model, given, dynamic_shapes=({0: rows}, (None, {0: rows})))
    fx2relax.from_exported_program(program).save(tmp_path / "a")
    artifact = deploy.load(tmp_path / "a")
    x, a, b = torch.randn(4, 4), torch.randn(3), torch.randn(4)
    with torch.no_grad():
        wanted = model(x, (a, b))
    found = artifact.main(x, a, b)
    np.testing.assert_allclose(found["y"], wanted["y"], atol=1e-5)
    np.testing.assert_array_equal(found["z"], wanted["z"])
    with pytest.raises(ValueError, match="is 10, and has to be at least 2 and at most 9"):
        artifact.main(torch.randn(10, 4), a, torch.randn(10))


def test_weights_without_data(model, tmp_path):
    with torch.device("meta"):
        empty = Model().eval()
    spec = {"prefill": {"x": Tensor((2, 3, 8))}}
    exported = fx2relax.export(empty, spec)
    exported.build().save(tmp_path / "a", weights=False)
    artifact = deploy.load(tmp_path / "a")
    x = torch.randn(2, 3, 8)
    with pytest.raises(fx2relax.ArtifactError, match="without weights"):
        artifact.prefill(x)
    kept = {name: value for name, value in model.state_dict().items() if name in artifact.weights}
    artifact.weights.load_state_dict(kept)
    with torch.no_grad():
        np.testing.assert_allclose(artifact.prefill(x), model.prefill(x), atol=1e-5)
    exported.params["up.weight"] = model.up.weight
    with pytest.raises(fx2relax.WeightError, match=r"have no data: gate\.weight"):
        exported.save(tmp_path / "b")
    assert not (tmp_path / "b").exists()


GENERATE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "sympy", "transformers"):
            raise ImportError(name)

sys.meta_path.insert(0, Blocked())
import fx2relax
import subprocess
import sys

import numpy as np
artifact = fx2relax.load(sys.argv[1])
logits, cache = artifact.prefill(np.load(sys.argv[2]))
found = []
for _ in range(64):
    found.append(logits.argmax(-1)[:, None])
    logits, cache = artifact.decode(found[-1], cache)
np.save(sys.argv[3], np.stack(found))
"""


def test_a_llama_generates_the_same_tokens_without_torch(tmp_path):
    torch.manual_seed(0)
    model = llama.Llama().eval()
    ids = torch.randint(0, 211, (2, 7))
    wanted = torch.stack(llama.greedy(model.prefill, model.decode, ids, 64))
    fx2relax.export(model, llama.specs(model)).save(tmp_path / "a")
    np.save(tmp_path / "ids.npy", ids.numpy())
    places = [str(tmp_path / name) for name in ("a", "ids.npy", "found.npy")]
    subprocess.run([sys.executable, "-c", GENERATE, *places], check=True)
    np.testing.assert_array_equal(np.load(tmp_path / "found.npy"), wanted)
