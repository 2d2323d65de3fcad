"""What processes do with a compiled model that tests start: they import this file.

    python tests/process_cases.py NAME

runs one of the cases that stand for themselves, and ends with 0 where all was well.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

_SECONDS = 240


class Net(nn.Module):
    """Two products, and kernels that run in parallel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.gelu(self.first(x))).softmax(-1)


def rows() -> torch.Tensor:
    return torch.linspace(-1, 1, 64 * 512).reshape(512, 64)


def expected() -> torch.Tensor:
    with torch.no_grad():
        return Net().eval()(rows())


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """A dataset whose items a compiled model makes."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        with torch.no_grad():
            return self.model(rows())[index]


def compiled() -> Any:
    return torch.compile(Net().eval(), backend="relax")


def call(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(rows())


def is_right(model: Any) -> bool:
    """Called in another process."""
    return torch.allclose(call(model), expected(), atol=1e-5)


def _warm() -> Any:
    model = compiled()
    for _ in range(3):  # the second program is being compiled in the background
        assert is_right(model)
    return model


def _child(work: Callable[[], bool]) -> bool:
    """Whether a forked child does its work; it is stopped where it hangs."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if work() else 1)
    return os.waitpid(child, 0)[1] == 0


def forked() -> None:
    """Children call what was compiled, compile, and train; then the parent goes on."""
    model = _warm()

    def one_thread() -> bool:
        torch.set_num_threads(1)
        return is_right(model)

    def compiles() -> bool:
        torch.set_num_threads(1)
        fast = torch.compile(lambda x: (x * 3).sin(), backend="relax")
        x = torch.randn(9)
        return all(torch.allclose(fast(x), (x * 3).sin(), atol=1e-6) for _ in range(3))

    def trains() -> bool:
        torch.set_num_threads(1)
        net = Net()
        fast = torch.compile(net, backend="relax")
        for module in (fast, net):
            module(rows())[:, 0].sum().backward()
        return all(p.grad is not None for p in net.parameters())

    for work in (one_thread, compiles, trains):
        assert _child(work), work.__name__
    assert is_right(model)


def forked_with_threads() -> None:
    """Where eager works with several threads in a child, a compiled model does."""
    net, model = Net().eval(), _warm()
    eager = _child(lambda: is_right(net))
    ours = _child(lambda: is_right(model))
    assert ours or not eager, (eager, ours)


def fork_while_others_call() -> None:
    """Children are forked while threads call what the backend made.

    They call past Dynamo, which holds locks of its own while it compiles and while it checks its
    guards: a child that is forked at that moment waits for them, whatever the backend.
    """
    import threading

    import fx2relax
    from fx2relax.backend import relax

    torch.set_num_threads(1)
    seen: list[Any] = []

    def kept(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        made = relax(graph, inputs)

        def call(*arguments: torch.Tensor) -> Any:
            seen[:] = made, arguments
            return made(*arguments)

        return call

    model, wanted = torch.compile(Net().eval(), backend=kept), expected()
    for _ in range(10):  # it has chosen how to run by then
        assert is_right(model)
    fx2relax.wait_for_compilation()
    made, arguments = seen
    stop = threading.Event()
    wrong: list[torch.Tensor] = []

    def is_wanted() -> bool:
        torch.set_num_threads(1)
        with torch.no_grad():
            (found,) = made(*arguments)
        if not torch.allclose(found, wanted, atol=1e-5):
            wrong.append(found)
        return not wrong

    def work() -> None:
        while not stop.is_set():
            is_wanted()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert all(_child(is_wanted) for _ in range(50))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong


def started(method: str) -> None:
    """Processes of a pool call a compiled model that they are sent."""
    model = _warm()
    context = multiprocessing.get_context(method)
    with context.Pool(2, torch.set_num_threads, (1,)) as pool:
        assert pool.map_async(is_right, [model] * 4).get(_SECONDS) == [True] * 4
    assert is_right(model)


def loaded(method: str) -> None:
    """Workers of a DataLoader call a compiled model."""
    data = Rows(_warm())
    loader = torch.utils.data.DataLoader(
        data, batch_size=2, num_workers=2, multiprocessing_context=method, timeout=_SECONDS
    )
    torch.testing.assert_close(torch.cat(list(loader)), expected()[:8])


CASES: dict[str, Callable[[], None]] = {
    "forked": forked,
    "forked with threads": forked_with_threads,
    "forked while others call": fork_while_others_call,
    **{
        f"{what.__name__} {how}": lambda what=what, how=how: what(how)  # type: ignore[misc]
        for what in (started, loaded)
        for how in ("fork", "spawn", "forkserver")
    },
}

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    import process_cases

    process_cases.CASES[sys.argv[1]]()
