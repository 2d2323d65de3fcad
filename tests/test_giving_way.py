"""What compiles while nobody waits leaves the processors to those who compute."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from test_compile_process import say

from fx2relax.compiling import client, messages, process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it is a fork on Linux alone")


@pytest.mark.parametrize(("wholly", "policy"), [(True, "SCHED_IDLE"), (False, "SCHED_OTHER")])
def test_what_nobody_waits_for_gives_way(wholly: bool, policy: str) -> None:
    found: list[tuple[int, int]] = []

    def work() -> None:
        before = os.getpriority(os.PRIO_PROCESS, 0)
        process._give_way(wholly)
        nicer = os.getpriority(os.PRIO_PROCESS, 0) - before
        found.append((os.sched_getscheduler(0), nicer))

    thread = threading.Thread(target=work)  # this one cannot take it back
    thread.start()
    thread.join()
    assert found == [(getattr(os, policy), 0 if wholly else process._NICE)]


def test_a_process_of_the_same_session_shares_its_processors(tmp_path: Path) -> None:
    script = """
        is_right()
        pids = others()
        sessions = {os.getsid(pid) == os.getsid(0) for pid in pids}
        groups = {os.getpgid(pid) == os.getpgid(0) for pid in pids}  # Ctrl-C is not for them
        print(len(pids) > 0, sessions, groups)
    """
    assert say(script, tmp_path) == "True {True} {False}"


@pytest.mark.parametrize(("computed", "yields"), [([0, 0.01, 0.02], False), ([0, 0.2, 0.4], True)])
def test_what_yields_in_vain_is_asked_for_anew(
    computed: list[float], yields: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where others leave no processor, it computes beside them."""
    monkeypatch.setattr(client, "_YIELDS", 0.1)
    asked: list[bool] = []
    threads: list[threading.Thread] = []

    def channel(waited_for: bool) -> socket.socket:
        assert not waited_for
        here, there = socket.socketpair()

        def work() -> None:
            with there:
                asked.append(messages.receive(there)[0]["yields"])
                with contextlib.suppress(OSError):  # it was not waited for
                    for seconds in computed:
                        messages.send(there, {"computed": seconds})
                        time.sleep(0.15)
                    messages.send(there, {"said": {}, "about": {}, "log": []}, b"code")

        threads.append(threading.Thread(target=work))
        threads[-1].start()
        return here

    monkeypatch.setattr(client, "_channel", channel)
    entry = client.Asked({"waited_for": False, "yields": True}).answer()
    for thread in threads:
        thread.join()
    assert entry is not None
    assert entry.library == b"code"
    assert asked == ([True] if yields else [True, False])


_BESIDE_A_THREAD = """
    import time
    from fx2relax import drafts
    compiled = []
    def noted(self, library, *arguments, compile=drafts.Draft.compile, **named):
        compiled.append(library)
        return compile(self, library, *arguments, **named)
    drafts.Draft.compile = noted
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
"""


def test_an_interpreter_compiles_where_none_may_be_forked(tmp_path: Path) -> None:
    script = """
        is_right()
        pids = others()
        sessions = {os.getsid(pid) == os.getsid(0) for pid in pids}
        torch._dynamo.reset()  # sizes that differ would be symbols
        is_right(torch.nn.Conv2d(3, 8, 3), torch.randn(2, 3, 9, 9))
        end.set(); thread.join()
        torch._dynamo.reset()
        is_right(torch.nn.Linear(32, 16))  # nobody is to wait for that interpreter
        left = [line for line in lines if "in this process" in line]
        print(compiled, sessions, min(pids) in others(), client._spawned, left)
    """
    script = textwrap.dedent(_BESIDE_A_THREAD) + textwrap.dedent(script)
    said = say("from fx2relax.compiling import client\n" + script, tmp_path)
    assert said == "['torch', 'torch', 'torch'] {True} True True []"


def test_what_only_this_process_knows_is_compiled_here(tmp_path: Path) -> None:
    script = """
        library = torch.library.Library("mine", "DEF")
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")
        is_right(lambda x: torch.ops.mine.twice(net(x)))
        print(compiled, any("compiled in this process" in line for line in lines))
        end.set()
    """
    script = textwrap.dedent(_BESIDE_A_THREAD) + textwrap.dedent(script)
    assert say(script, tmp_path) == "['torch', 'generated'] True"
