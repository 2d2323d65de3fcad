"""TVM as it is imported here is what ``import tvm`` brings."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from fresh_process import run

import fx2relax
from fx2relax.collecting import paused, set_aside

_SCRIPT = """
    import gc, json, os, sys, tvm_ffi
    if sys.argv[1] == "ours":
        from fx2relax import tvm_import
        tvm_import.load()
        tvm_import.load()
    import tvm
    operators = tvm.ir.Op
    own = operators.get.__module__, tvm.ir.op._ffi_api.RegisterOpAttr.__class__.__name__
    def printed(name):
        return operators.get(name).get_attr("TScriptPrinterName")
    before = tvm.runtime.disco is None
    def kept(name):  # what an import that fails leaves behind
        return "disco" not in name
    modules = sorted(m for m in sys.modules if m.split(".")[0] == "tvm" and kept(m))
    if "tvm_runtime_extra" in tvm.base._LOADED_LIBS:
        import tvm.runtime.disco
    print(json.dumps({
        "own": own,
        "operators": {name: str(printed(name)) for name in sorted(operators.list_op_names())},
        "functions": [f for f in sorted(tvm_ffi.registry.list_global_func_names()) if kept(f)],
        "modules": modules,
        "libraries": sorted(tvm.base._LOADED_LIBS),
        "distributed": [before, "tvm.runtime.disco" in sys.modules],
        "environment": os.environ.get("TVM_DEVICE_BACKEND_AUTOLOAD"),
        "collects": gc.isenabled(),
    }))
"""


def imported(how: str, **variables: str) -> dict[str, Any]:
    root = str(Path(fx2relax.__file__).parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_SCRIPT), how],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | variables,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.sweep(6)
@pytest.mark.parametrize("chosen", [None, "0", "1"])
def test_it_is_the_same(chosen: str | None) -> None:
    variables = {} if chosen is None else {"TVM_DEVICE_BACKEND_AUTOLOAD": chosen}
    ours, plain = imported("ours", **variables), imported("plain", **variables)
    assert len(plain["operators"]) > 500
    assert ours == plain
    assert ours["environment"] == chosen


def test_collections_are_set_aside_and_come_back() -> None:
    kept = gc.get_freeze_count()
    with set_aside():
        assert gc.isenabled()
        assert gc.get_freeze_count() > kept
        with set_aside():  # what is frozen by someone stays so
            pass
        assert gc.get_freeze_count() > kept
    assert gc.get_freeze_count() == 0
    with paused():
        assert not gc.isenabled()
        with paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


_TRACED = """
    import gc, torch, fx2relax.backend
    seen = []
    def works(graph, inputs):
        seen.append(gc.get_freeze_count() > 0)
        return graph.forward
    def fails(graph, inputs):
        seen.append(gc.get_freeze_count() > 0)
        raise ValueError
    torch.compile(lambda x: x + 1, backend=works)(torch.ones(3))
    seen.append(gc.get_freeze_count())
    try:
        torch.compile(lambda x: x * 2, backend=fails)(torch.ones(3))
    except Exception as error:
        seen.append("ValueError" in str(error))
    print(*seen, gc.get_freeze_count())
"""


def test_nor_does_a_collection_look_at_them_while_dynamo_traces(tmp_path: Path) -> None:
    """Until it hands a graph over, and whether or not that can be compiled."""
    assert run(_TRACED, tmp_path) == "True 0 True True 0"
