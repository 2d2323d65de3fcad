"""A second process finds a whole network compiled, and compiles nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fresh_process import run

_SCRIPT = """
    import json, time
    start = time.perf_counter()
    import torch
    import fx2relax, fx2relax.backend
    from fx2relax import stages
    imported = time.perf_counter() - start
    from benchmarks.networks.language import bert

    class Watch:  # it does not count as looking on
        stages, seconds = [], 0.0
        def note(self, stage, what):
            self.stages.append(what["of"] if stage == "time" else stage)

    stages.listeners.append(Watch())
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net, arguments = bert(1)
    fast = torch.compile(net, backend="relax")
    with torch.no_grad():
        start = time.perf_counter()
        result = fast(*arguments)
        first = time.perf_counter() - start
        for _ in range(3):
            fast(*arguments)
        assert fx2relax.wait_for_compilation(600)
        fast(*arguments)
        all_programs = time.perf_counter() - start
        expected = net(*arguments)
    for one, other in zip(result, expected):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    stats = fx2relax.stats()
    print(json.dumps({
        "import": imported,
        "first": first,
        "ours": stats["compile_seconds"],
        "all": all_programs,
        "stages": Watch.stages,
        "found": stats["cache_hits"],
        "missed": stats["cache_misses"],
        "graphs": stats["graphs"],
        "traced": torch._dynamo.utils.counters["aot_autograd"]["total"],
    }))
"""


def start(store: Path) -> dict[str, Any]:
    """Run BERT's first four layers in a process; what it says."""
    # The stages of compiling are told of in the process that goes through them.
    said = run(_SCRIPT, store, compile_process=False, helper=False)
    found: dict[str, Any] = json.loads(said)
    return found


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    cold, warm = start(tmp_path), start(tmp_path)
    assert "compile kernels" in cold["stages"]
    assert cold["missed"] > 0
    for stage in ("import", "lower", "plan memory", "compile kernels"):
        assert stage not in warm["stages"]
    assert warm["missed"] == 0
    assert (cold["traced"], warm["traced"]) == (1, 0)
    assert warm["first"] < cold["first"] / 2  # a quarter where nothing else runs
    assert warm["ours"] < cold["ours"] / 4  # a thirtieth
    assert warm["found"] >= warm["graphs"] == 1


_CALLS = """
import torch, fx2relax, sys
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 128))
x = torch.randn(64, 256)
fast = torch.compile(net, backend="relax")
with torch.no_grad():
    for _ in range(int(sys.argv[1])):
        torch.testing.assert_close(fast(x), net(x))
assert fx2relax.wait_for_compilation(300)
print("tvm" in sys.modules, fx2relax.stats()["cache_hits"], fx2relax.stats()["cache_misses"])
"""


def test_a_second_program_is_imported_when_it_is_wanted(tmp_path: Path) -> None:
    """It is compiled from the second call on, and needs the compiler then, not before."""
    said = [run(_CALLS, tmp_path, str(calls), compile_process=False) for calls in (1, 1, 3, 1)]
    assert said == ["True 0 2", "False 1 1", "True 1 1", "False 2 0"]


_KERNELS = """
import sys, torch, fx2relax
import torch.nn.functional as F
torch.manual_seed(0)
a, b = torch.eye(6) * 3 + torch.ones(6, 6), torch.randn(6, 6)
rnn = torch.nn.LSTM(6, 6, batch_first=True)
def solved(a, b):
    return torch.linalg.solve(a, b), torch.linalg.eigh(a)[0], torch.linalg.qr(a)[1], a.det()
def ordered(a, b):
    return b.sort(0)[0], b.topk(2)[0], b.cumsum(1), b.argmax(), b.unique(), b.nonzero()
def looked_up(a, b):
    return F.embedding_bag(b.abs().long() % 6, a), F.interpolate(b[None, None], scale_factor=2)
def in_turn(a, b):
    return rnn(b[None])[0], torch.fft.rfft(b).abs(), F.max_pool1d(b, 2), b.median()
for function in (solved, ordered, looked_up, in_turn):
    fast = torch.compile(function, backend="relax", options={"library": sys.argv[1]})
    with torch.no_grad():
        torch.testing.assert_close(fast(a, b), function(a, b), rtol=1e-4, atol=1e-4)
stats = fx2relax.stats()
print(stats["cache_hits"], stats["cache_misses"], stats["fallback_ops"])
"""


@pytest.mark.sweep(2)
@pytest.mark.parametrize("library", ["torch", "none"])
def test_whatever_a_program_calls_is_there_in_a_second_process(
    library: str, tmp_path: Path
) -> None:
    cold, warm = (run(_KERNELS, tmp_path, library, compile_process=False) for _ in range(2))
    hits, misses, *fallback = cold.split(maxsplit=2)
    assert warm.split(maxsplit=2) == [misses, hits, *fallback]


_THREADS = """
import os
os.environ["OMP_NUM_THREADS"] = "2"  # which TVM's pool heeds, too
import threading, torch, fx2relax
torch.set_num_threads(2)
x = torch.randn(2048, 2048)
(x @ x).sin()  # begins PyTorch's threads
fast = torch.compile(lambda x: x.sin().exp() + 1, backend="relax", options={"never_slower": False})
with torch.no_grad():
    for _ in range(2):
        fast(x)
    assert fx2relax.wait_for_compilation(600)
others = sum(t.name == "tqdm_monitor" for t in threading.enumerate())  # tracing begins one
print(fx2relax.stats()["cache_hits"], len(os.listdir("/proc/self/task")) - others)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_program_that_is_found_runs_on_pytorchs_threads(tmp_path: Path) -> None:
    cold = run(_THREADS, tmp_path, compile_process=False).split()
    warm = run(_THREADS, tmp_path, compile_process=False).split()
    assert (cold[0], warm[0]) == ("0", "1")
    assert warm[1] == cold[1]  # the cold one has TVM's library loaded before it shares threads


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for _ in range(2):
        told = start(folder)
        print({k: round(v, 2) if isinstance(v, float) else v for k, v in told.items()})
