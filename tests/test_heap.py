"""How much memory there is, as the system says it, and what becomes of memory that is freed."""

from __future__ import annotations

import gc
import platform
from pathlib import Path

import pytest
import torch
from fresh_process import run

from fx2relax.runtime import heap

_CONVOLUTIONS = """
    import resource
    import torch
    import fx2relax

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.steps = torch.nn.ModuleList(torch.nn.Conv2d(3, 32, 3) for _ in range(4))

        def forward(self, x):
            a, b, c, d = (step(x) for step in self.steps)
            return (a * b * c * d).sum()

    torch.set_num_threads(1)
    x, net = torch.randn(1, 3, 224, 224), Net()
    compiled = torch.compile(net, backend="relax", options={"never_slower": False})
    with torch.no_grad():
        for _ in range(5):
            compiled(x)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            compiled(x)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

_LIBC = """
    import ctypes
    import sys
    from fx2relax.runtime import heap

    libc = ctypes.CDLL(None)
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
"""

_STEPS = f"""{_LIBC}
    def cut_off():
        blocks = [libc.malloc(28 << 20) for _ in range(8)]
        end = libc.sbrk(0)
        for block in reversed(blocks):
            libc.free(block)
        return end - libc.sbrk(0)

    class Program:
        pass

    heap.keep_freed()
    told, program = [cut_off()], Program()
    heap.keep_for(program, **{{sys.argv[1]: 8 * 28 << 20}})
    told.append(cut_off())
    del program
    print(*told, cut_off())
"""

_FREE_ALREADY = f"""{_LIBC}
    libc.free(libc.malloc(20 << 20))
    for block in [libc.malloc(19 << 20) for _ in range(2)]:
        libc.free(block)
    heap.keep_freed()
    heap.keep_for(heap, call=1 << 20)
    blocks = [libc.malloc(28 << 20) for _ in range(4)]
    print(sum(block < libc.sbrk(0) for block in blocks))
"""


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose files stand in for the system's."""
    monkeypatch.setattr(heap, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(heap, "_GROUP", tmp_path)
    return tmp_path


def test_half_of_what_is_available(system: Path) -> None:
    (system / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:    2000 kB\nCached: 1 kB\n")
    assert heap.leaves_room_for(1000 << 10)
    assert not heap.leaves_room_for((1000 << 10) + 1)


def test_a_container_has_less(system: Path) -> None:
    (system / "meminfo").write_text("MemAvailable:    2000 kB\n")
    (system / "memory.max").write_text("5000\n")
    (system / "memory.current").write_text("4000\n")
    assert heap.leaves_room_for(500)
    assert not heap.leaves_room_for(501)
    (system / "memory.stat").write_text("active_file 7\ninactive_file 2000\n")
    assert heap.leaves_room_for(1500)
    assert not heap.leaves_room_for(1501)
    (system / "memory.max").write_text("max\n")
    assert heap.leaves_room_for(1000 << 10)


def test_nobody_says(system: Path) -> None:
    assert heap.leaves_room_for(1 << 60)


def test_this_machine() -> None:
    assert heap.leaves_room_for(0)
    assert heap.leaves_room_for(1 << 20)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
def test_what_a_call_frees_is_there_for_the_next(tmp_path: Path) -> None:
    """Four results of 1,540 pages each were mapped anew at each call, all or one of them."""
    assert int(run(_CONVOLUTIONS, tmp_path)) < 10 * 700


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
@pytest.mark.parametrize("what", ["call", "step"])
def test_what_a_step_frees_is_there_for_the_next(what: str, tmp_path: Path) -> None:
    before, during, after = map(int, run(_STEPS, tmp_path, what).split())
    assert before > 2 * heap.KEPT
    assert during == 0
    assert after > 2 * heap.KEPT


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
def test_what_is_free_already_does_not_matter(tmp_path: Path) -> None:
    """Where as much as is kept at most is free before, nothing so large is mapped and freed."""
    assert run(_FREE_ALREADY, tmp_path) == "4"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072"),
    ],
)
def test_a_threshold_of_the_users_stays(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert heap._option.__wrapped__() is None


@pytest.fixture
def set_to(monkeypatch: pytest.MonkeyPatch, fresh: None) -> list[int]:
    """What the threshold is set to, in a process in which no program has been made."""
    found: list[int] = []

    def set_option(option: int, size: int) -> int:
        if option == heap._TRIM_THRESHOLD:
            found.append(size)
        return 1

    monkeypatch.setattr(heap, "_option", lambda: set_option)
    monkeypatch.setattr(heap, "_frees", {})
    return found


def test_programs_of_a_step_say_what_it_frees(set_to: list[int]) -> None:
    net = torch.nn.Linear(300, 200)
    compiled = torch.compile(net, backend="relax")
    result, gradients = 4 * 8 * 200, 4 * (300 * 200 + 200)
    with torch.no_grad():
        compiled(torch.randn(8, 300))
    assert set_to[-1] == 2 * heap.KEPT + result
    compiled(torch.randn(8, 300)).sum().backward()
    assert set_to[-1] >= 2 * heap.KEPT + result + gradients
    del compiled
    torch._dynamo.reset()
    gc.collect()
    assert set_to[-1] == 2 * heap.KEPT


def test_calls_say_what_the_library_allocates(set_to: list[int]) -> None:
    """The largest of them counts: one has freed it all before the next begins."""

    def call(batch: int) -> int:
        net = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Flatten(1))
        compiled = torch.compile(net, backend="relax", dynamic=False)
        with torch.no_grad():
            compiled(torch.randn(batch, 3, 18, 18))
        kept.append(compiled)
        return 2 * 4 * batch * 32 * 16 * 16  # the convolution's own, and the result

    kept: list[object] = []
    least = call(4)
    assert set_to[-1] == 2 * heap.KEPT + least
    most = call(8)
    assert set_to[-1] == 2 * heap.KEPT + most
    call(2)
    assert set_to[-1] == 2 * heap.KEPT + most


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The addresses and bytes for which the system was told that they are to lie in large pages."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(heap, "_advised", {})
    monkeypatch.setattr(heap, "_advise", lambda: lambda start, size, _: found.append((start, size)))
    monkeypatch.setattr(heap, "_option", lambda: lambda option, size: 1)
    return found


def test_memory_that_is_kept_is_advised_now_and_then(advised: list[tuple[int, int]]) -> None:
    result = torch.empty(8 << 20, dtype=torch.uint8)
    for _ in range(3 * (heap._TAKEN + 1)):
        assert heap.in_large_pages(result) is result
    assert len(advised) == 3
    start, size = advised[0]
    assert result.data_ptr() <= start
    assert start + size <= result.data_ptr() + result.nbytes
    assert start % heap.LARGE == size % heap.LARGE == 0
    assert size >= 6 << 20


def test_a_longer_result_at_the_same_place_is_advised(advised: list[tuple[int, int]]) -> None:
    memory = torch.empty(16 << 20, dtype=torch.uint8)
    heap.in_large_pages(torch.frombuffer(memory.numpy(), dtype=torch.uint8, count=8 << 20))
    heap.in_large_pages(memory)
    assert len(advised) == 2


def test_memory_that_goes_back_is_advised_each_time(
    advised: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped = torch.empty(heap.KEPT + 1, dtype=torch.uint8)
    for _ in range(5):
        heap.in_large_pages(mapped)
    assert len(advised) == 5
    monkeypatch.setattr(heap, "_option", lambda: None)  # a threshold that the user has set
    small = torch.empty(8 << 20, dtype=torch.uint8)
    for _ in range(5):
        heap.in_large_pages(small)
    assert len(advised) == 10


def test_addresses_that_are_remembered_are_not_without_end(
    advised: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heap, "_PLACES", 3)
    kept = [torch.empty(4 << 20, dtype=torch.uint8) for _ in range(10)]
    for result in kept:
        heap.in_large_pages(result)
    assert len(advised) == 10
    assert len(heap._advised) <= 3
