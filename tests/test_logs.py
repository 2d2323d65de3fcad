"""TORCH_LOGS and TORCH_TRACE show what was compiled, and nothing is shown unasked."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from fresh_process import give_helper

from fx2relax import logs

SCRIPT = """
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(8, 48), torch.nn.GELU(), torch.nn.Softmax(-1)).eval()
    fast = torch.compile(net, backend="relax")
    with torch.no_grad():
        fast(torch.randn(3, 8))
"""

# The same at another width each time, so that none is found compiled.
SWITCHED = """
    import logging, os, sys
    import torch

    for width, artifact in enumerate(os.environ["ARTIFACTS"].split(","), 48):
        torch._logging.set_logs(modules={f"fx2relax.logs.{artifact}": logging.DEBUG})
        torch._dynamo.reset()
        parts = torch.nn.Linear(8, width), torch.nn.GELU(), torch.nn.Softmax(-1)
        fast = torch.compile(torch.nn.Sequential(*parts).eval(), backend="relax")
        if width > 48:
            print("next artifact", file=sys.stderr)
        with torch.no_grad():
            fast(torch.randn(3, 8))
"""


def _said(tmp_path: Path, script: str = SCRIPT, **environment: str) -> str:
    give_helper(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={
            **os.environ,
            "FX2RELAX_CACHE": "1",
            "FX2RELAX_CACHE_DIR": str(tmp_path),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_nothing_is_shown_unasked(tmp_path: Path) -> None:
    assert _said(tmp_path) == ""


def test_a_line_for_each_graph(tmp_path: Path) -> None:
    said = _said(tmp_path, TORCH_LOGS="fx2relax")
    assert "inference graph: 4 nodes, of which 0 run in PyTorch" in said
    assert "found compiled" not in said
    assert "T.prim_func" not in said
    assert "found compiled" in _said(tmp_path, TORCH_LOGS="fx2relax")


def test_each_artifact_alone(tmp_path: Path) -> None:
    """As switched in a program, one after the other; by the environment, the first of them."""
    shown = {
        "relax_ir": "R.nn.gelu(",
        "fusion": "fused_add_gelu_softmax: add, gelu, softmax",
        "tir": "# fused_add_gelu_softmax\n",
        "kernels": "= fx2relax.library.rows_nt",
        "library": "1 x library.rows_nt",
        "cache": "stored: ",
    }
    assert shown.keys() == set(logs.ARTIFACTS)
    said = _said(tmp_path, SWITCHED, ARTIFACTS=",".join(shown))
    parts = dict(zip(shown, said.split("next artifact\n"), strict=True))
    parts["relax_ir"] += _said(tmp_path, TORCH_LOGS="+fx2relax.logs.relax_ir")
    for artifact, text in shown.items():
        assert text in parts[artifact]
        others = [name for name in shown if name != artifact]
        assert not [name for name in others if f"[__{name}]" in parts[artifact]]


def test_all_of_them(tmp_path: Path) -> None:
    said = _said(tmp_path, TORCH_LOGS="+fx2relax")
    for text in ("R.nn.gelu(", "# fused_add_gelu_softmax\n", "1 x library.rows_nt", "missed: "):
        assert text in said


def test_the_structured_trace(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    _said(tmp_path, TORCH_TRACE=str(folder))
    trace = "".join(path.read_text(encoding="utf-8") for path in folder.iterdir())
    for name in ("fx2relax_relax_ir", "fx2relax_tir", "fx2relax_cache"):
        assert name in trace
    assert "R.nn.gelu(" in trace


def test_as_switched_at_run_time(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    with caplog.at_level(logging.DEBUG, logger="fx2relax.logs.relax_ir"):
        torch.compile(lambda x: x.sin() + 1, backend="relax")(torch.randn(3))
    (record,) = [r for r in caplog.records if r.name == "fx2relax.logs.relax_ir"]
    assert "R.sin(" in record.getMessage()
    torch._dynamo.reset()
