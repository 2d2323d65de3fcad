"""A graph is handed back to Dynamo while another process compiles it; its first call waits."""

from __future__ import annotations

import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from test_compile_process import say

from fx2relax.alternatives import Alternatives

linux = pytest.mark.skipif(sys.platform != "linux", reason="the other process is a fork")

_BEGIN = """
import os, sys, torch, fx2relax.backend
from fx2relax.compiling import client
order, told, answer = [], [], client.Asked.answer
def tell(*words):
    told.append(" ".join(map(str, words)))
def compiled(function, **options):
    def backend(graph, inputs):
        made = fx2relax.backend.relax(graph, inputs, options=options)
        order.append("returned")
        return made
    order.clear()
    return torch.compile(function, backend=backend)
def noted(self, *arguments):
    if self._request["library"] == "torch":  # the other program comes later
        order.append("answered")
    return answer(self, *arguments)
client.Asked.answer = noted
torch.set_grad_enabled(False)
"""


def _say(script: str, store: Path) -> list[str]:
    """What a script tells, with the others' beginning before it."""
    script = _BEGIN + textwrap.dedent(script) + "\nprint(*told, sep='; ')"
    return say(script, store).split("; ")


@linux
def test_what_returns_first(tmp_path: Path) -> None:
    """What is compiled does; not where its errors, or guards on sizes, are wanted at once."""
    script = """
        for function, options in [
            (net, {}),
            (net, {}),
            (lambda x: net(x) + 1, {"on_unsupported": "raise"}),
            (lambda x: net(x) + 2, {"library": "torch"}),
        ]:
            torch._dynamo.reset()
            fast = compiled(function, **options)
            for _ in range(3):
                torch.testing.assert_close(fast(x), function(x))
            tell(*order)
        os.environ["FX2RELAX_BACKGROUND"] = "0"
        fast = compiled(lambda x: net(x) + 3)
        torch.testing.assert_close(fast(x), net(x) + 3)
        tell(*order)
        stats = fx2relax.stats()
        tell(stats["graphs"], stats["nodes_fallback"], here())
    """
    first, found, raising, again, still, end = _say(script, tmp_path)
    assert (first, found, again) == ("returned answered", "returned", "returned answered")
    assert raising == still == "answered returned"
    assert end == "5 0 False"


@linux
def test_a_graph_that_cannot_be_compiled(tmp_path: Path) -> None:
    """It runs in eager, which nothing is timed against, and one warning says why."""
    script = """
        from fx2relax import programs
        from fx2relax.errors import BuildFailure
        def fail(*arguments):
            raise BuildFailure("there is no room")
        client.Asked.answer = lambda self: self._channel.close()
        programs.draft_of = fail
        fast = compiled(net)
        for _ in range(9):
            torch.testing.assert_close(fast(x), net(x))
        tell(len([line for line in lines if "there is no room" in line]))
        stats = fx2relax.stats()
        tell(stats["graphs"], stats["nodes_fallback"] > 0, stats["graphs_slower"])
    """
    assert _say(script, tmp_path) == ["1", "1 True 0"]


@linux
def test_the_first_call_is_interrupted(tmp_path: Path) -> None:
    """The next one compiles the graph, in this process."""
    script = """
        entry, asked = client._entry, []
        def interrupted(*arguments):
            asked.append(True)
            if len(asked) == 1:
                raise KeyboardInterrupt
            return entry(*arguments)
        client._entry = interrupted
        fast = compiled(net, library="torch")
        try:
            fast(x)
        except KeyboardInterrupt:
            tell("interrupted", here())
        torch.testing.assert_close(fast(x), net(x))
        tell(*order, here())
    """
    assert _say(script, tmp_path) == ["interrupted False", "returned answered answered True"]


@linux
def test_a_fork_before_the_first_call(tmp_path: Path) -> None:
    """The answer is the parent's; the child compiles for itself."""
    script = """
        parent, children = os.getpid(), []
        def forking(self):
            child = os.fork()
            if child:
                children.append(os.waitpid(child, 0)[1])
            return answer(self)
        client.Asked.answer = forking
        fast = compiled(net, library="torch")
        torch.testing.assert_close(fast(x), net(x))
        if os.getpid() != parent:
            os._exit(7 if here() else 1)
        tell(*map(os.waitstatus_to_exitcode, children), here())
    """
    assert _say(script, tmp_path) == ["7 False"]


def test_threads_wait_for_one_answer() -> None:
    made = []

    def arrive() -> Alternatives:
        time.sleep(0.2)
        made.append(True)
        return Alternatives({"torch": lambda arguments: sum(arguments)})

    ways, found = Alternatives.awaited(arrive), []
    threads = [threading.Thread(target=lambda: found.append(ways.call((1, 2)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [3] * 4
    assert len(made) == 1
    assert ways.names == ["torch"]


def test_it_is_asked_again_where_it_failed() -> None:
    tries = []

    def arrive() -> Alternatives:
        tries.append(True)
        if len(tries) == 1:
            raise MemoryError
        return Alternatives({"torch": lambda arguments: "there"})

    ways = Alternatives.awaited(arrive)
    with pytest.raises(MemoryError):
        ways.call(())
    assert ways.call(()) == ways.call(()) == "there"
    assert len(tries) == 2
