"""`aot_compile` saves what the backend compiled, and loads it in another process."""

import importlib
import subprocess
import sys

import pytest
import torch

import fx2relax

pytest.importorskip("torch._dynamo.aot_compile_types", reason="this PyTorch saves nothing")

MODEL = """
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.second(torch.nn.functional.gelu(self.first(x))) * x.shape[0]
"""
LOAD = """
import torch
from saved_model import Model

model = Model()
with open("model.pt", "rb") as file:
    loaded = torch._dynamo.aot_compile.AOTCompiledFunction.deserialize(file.read())
x = torch.arange(12.0).reshape(3, 4)
with torch.no_grad():
    assert torch.allclose(loaded(model, x), model(x), atol=1e-5)
import fx2relax

stats = fx2relax.stats()
assert stats["relax_calls"] and not stats["nodes_fallback"]
print("right")
"""


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dynamic", [False, True])
def test_saved_and_loaded(tmp_path, monkeypatch, dynamic):
    torch._dynamo.reset()
    fx2relax.reset_stats()
    (tmp_path / "saved_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("saved_model", None)
    model = importlib.import_module("saved_model").Model()
    x = torch.arange(12.0).reshape(3, 4)
    compiled = torch.compile(model, backend="relax", fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        saved = compiled.forward.aot_compile(((x,), {}))
        assert torch.allclose(saved(model, x), model(x), atol=1e-5)
    stats = fx2relax.stats()
    assert stats["relax_calls"]
    assert not stats["nodes_fallback"]
    saved.save_compiled_function(str(tmp_path / "model.pt"))
    run = [sys.executable, "-c", LOAD]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "right\n"
