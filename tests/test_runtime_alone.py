"""What sorts, in processes that have TVM's runtime and not its compiler."""

from __future__ import annotations

from pathlib import Path

import torch
from fresh_process import run

import fx2relax

_SORTED = """
import sys, torch
import fx2relax
def order(x):
    return x.sort(0).values, x.argsort(1, descending=True), x.topk(2, 0)
x = torch.randn(9, 5)
fast = torch.compile(order, backend="relax", options={"library": "none", "never_slower": False})
with torch.no_grad():
    torch.testing.assert_close(fast(x), order(x))
print("tvm" in sys.modules, fx2relax.stats()["nodes_fallback"])
"""

_LOADED = """
import sys
import numpy
import fx2relax
x = numpy.random.default_rng(0).standard_normal((4, 6)).astype("float32")
values, places = fx2relax.load(sys.argv[1])["forward"](x)
numpy.testing.assert_array_equal(values, numpy.sort(x, 1))
numpy.testing.assert_array_equal(places, numpy.argsort(x, 1))
print("tvm" in sys.modules)
"""


class Sort(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, places = x.sort(1)
        return values, places


def test_a_program_without_the_library(tmp_path: Path) -> None:
    # Compiled in a process of its own, then found on disk.
    assert [run(_SORTED, tmp_path) for _ in range(2)] == ["False 0", "False 0"]


def test_an_export_that_sorts(tmp_path: Path) -> None:
    exported = fx2relax.export(Sort().eval(), {"forward": {"x": torch.randn(4, 6)}})
    exported.build().save(tmp_path / "sort")
    assert run(_LOADED, tmp_path, str(tmp_path / "sort")) == "False"
