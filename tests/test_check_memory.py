"""How much memory `check` takes of a model, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

_PEAK = """
    import re, sys
    from pathlib import Path
    import torch
    from torch import nn
    import fx2relax, fx2relax.backend, fx2relax.pipeline

    class Layer(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.taken, self.given = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            parts = self.taken(self.norms[0](x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
            heads = nn.functional.scaled_dot_product_attention(*parts)
            x = x + self.given(heads.transpose(1, 2).flatten(2))
            return x + self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))

    def held(what):
        said = Path("/proc/self/status").read_text()
        return int(re.search(f"{what}:[^0-9]*([0-9]+) kB", said)[1]) / 1024

    torch.set_num_threads(1)
    torch.manual_seed(0)
    # What compiling takes that is not of the model: modules, TVM, LLVM.
    fx2relax.check(Layer(64).eval(), torch.randn(1, 8, 64))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = held("VmRSS")
    net = nn.Sequential(*[Layer(512) for _ in range(12)]).eval()
    x = torch.randn(int(sys.argv[2]), 256, 512)
    if sys.argv[1] == "eager":
        with torch.no_grad():
            net(x)
    else:
        found = fx2relax.check(net, x)
        assert found.right, found
        assert found.kernels > 60, found
    print(held("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no peak of memory is told")
@pytest.mark.whole
@pytest.mark.parametrize("batch", [24, 8])
def test_memory_is_at_most_twice_eagers(batch: int) -> None:
    """Of twelve layers of a transformer, with weights, and with all programs that might run."""
    peaks = {}
    for way in ("eager", "check"):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(_PEAK), way, str(batch)],
            env=dict(os.environ, FX2RELAX_NEVER_SLOWER="1"),
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stderr
        peaks[way] = float(done.stdout)
    assert peaks["check"] < 2 * peaks["eager"], peaks
