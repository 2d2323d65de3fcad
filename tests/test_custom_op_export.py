"""Operators of the user's in an export: their code is in the library that is saved."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import torch
from extern_sources import kernels

import fx2relax
from fx2relax import custom_op
from fx2relax.compat import te
from fx2relax.extern import ExternFunction

SCALE = custom_op(
    "fx2relax_export::scale", kernels()["scale"], schema="(Tensor x, float factor) -> Tensor"
)
MATRIX = fx2relax.Tensor(("n", "m"))
TWICE = custom_op(
    "fx2relax_export::twice",
    lambda x: te.compute(x.shape, lambda i, j: x[i, j] + x[i, j]),
    rule=ExternFunction([MATRIX], MATRIX),
    schema="(Tensor x) -> Tensor",
)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x):
        return TWICE(SCALE(self.linear(x), 0.5)).relu()

    def scaled(self, x):
        return SCALE(self.linear(x), 3.0)


def test_a_saved_export_runs_where_pytorch_is_not(tmp_path):
    model = Model().eval()
    spec = {"x": fx2relax.Tensor(("n", 4))}
    exported = fx2relax.export(model, {"forward": spec, "scaled": spec})
    exported.save(tmp_path / "saved")
    script = (
        "import sys\n"
        "sys.modules['torch'] = None  # not to be found\n"
        "import fx2relax, numpy as np\n"
        f"model = fx2relax.load({str(tmp_path / 'saved')!r})\n"
        "x = np.arange(20, dtype='float32').reshape(5, 4)\n"
        f"np.save({str(tmp_path / 'forward.npy')!r}, model['forward'](x))\n"
        f"np.save({str(tmp_path / 'scaled.npy')!r}, model['scaled'](x))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    x = torch.arange(20.0).reshape(5, 4)
    with torch.no_grad():
        for name in ("forward", "scaled"):
            saved = torch.from_numpy(np.load(tmp_path / f"{name}.npy"))
            torch.testing.assert_close(saved, getattr(model, name)(x))
