"""What tests of the cache store, and what processes do that they start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fx2relax import cache, disk

ENTRY = cache.Entry(bytes(1000), {"a": 1}, {"torch": "2"})

#: Compiles two programs, or finds them; prints how many it found, and what ran in PyTorch.
COMPILE = """
import torch, sys
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3)).eval()
print("ready", flush=True)
with torch.no_grad():
    x = torch.randn(4, 6)
    torch.testing.assert_close(torch.compile(net, backend="relax")(x), net(x))
    x = torch.randn(4, 6).softmax(1)
    torch._dynamo.reset()
    fn = lambda x: (x.cumsum(1) * 2).tanh()
    torch.testing.assert_close(torch.compile(fn, backend="relax")(x), fn(x))
import fx2relax
print(fx2relax.stats()["cache_hits"], fx2relax.stats()["nodes_fallback"])
"""

#: Stores and reads programs without end.
WRITE = """
import itertools, os, time
from fx2relax import cache

replace = os.replace

def slowly(*arguments):  # so that a signal comes while a file is being written
    time.sleep(0.005)
    replace(*arguments)

os.replace = slowly
store = cache.open_store(limit=3_000_000)
print("ready", flush=True)
for n in itertools.count():
    key = f"{n % 7}"
    body = bytes([n % 7]) * 700_000
    store.put(key, cache.Entry(body, {"n": n % 7}))
    store.note(key, n=n)
    store.hit(key)
    found = store.get(f"{(n + 3) % 7}")
    assert found is None or set(found.library) == {found.said["n"]}
"""


def run(script: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run a script in a process, after the words of a command."""
    command = [*before, sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own, of which nothing was said yet."""
    monkeypatch.setenv("FX2RELAX_CACHE", "1")
    monkeypatch.setenv("FX2RELAX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(disk, "_told", set())


@pytest.fixture
def store(tmp_path: Path) -> cache.Store:
    """A store with one entry."""
    made = cache.open_store(limit=1 << 20)
    assert made is not None
    made.put("key", ENTRY)
    assert made.get("key") == ENTRY
    return made
