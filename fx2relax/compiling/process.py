"""The process that compiles: it imports TVM, and forks once a request.

It is a fork of the user's process, or an interpreter of its own where that may not be forked. It
holds none of the user's files, and ends with the user's process, or when nothing was asked of it
for a while.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch._subclasses import FakeTensorMode

from fx2relax import another_python
from fx2relax.compiling import leaving, messages

#: Seconds without a request after which it ends.
IDLE = 60.0
#: Every so many seconds it tells that it is at work.
TOLD = 0.5
# By how much what nobody waits for is nicer, where it does not yield altogether.
_NICE = 5
_PR_SET_NAME = 15
# An interpreter that imports nothing starts within so many seconds.
_BEGINS = 30.0
_SPAWNED = f"""
import os
os.setpgid(0, 0)  # as `_detached` does it
os.nice({_NICE})
if os.fork():
    os._exit(0)
from fx2relax.compiling import process
process.run_spawned(int(sys.argv[1]))
"""
_log = logging.getLogger("fx2relax")


def begin() -> socket.socket:
    """Fork the process; returns the socket that takes requests.

    Raises:
        OSError: the system gives no process, or no socket.
    """
    here, there = socket.socketpair()
    with there:
        try:
            first = os.fork()
        except OSError:
            here.close()
            raise
        if first == 0:
            _detached(there)
        with contextlib.suppress(ChildProcessError):  # the system waits for it, if told so
            os.waitpid(first, 0)
    return here


def spawn() -> socket.socket:
    """`begin`, as an interpreter of its own: it takes seconds to get ready, in which it is nice.

    Raises:
        OSError: it cannot be started.
        subprocess.SubprocessError: it has ended before it began.
    """
    here, there = socket.socketpair()
    with there:
        number = there.fileno()
        try:
            # The system waits for the one that gets ready: the first ends at once.
            subprocess.run(
                another_python.command(_SPAWNED, str(number)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[number],
                check=True,
                timeout=_BEGINS,
            )
        except BaseException:
            here.close()
            raise
    return here


def run_spawned(number: int) -> None:
    """What the other interpreter does with the number of its end of the socket."""
    _run(socket.socket(fileno=number))


def _detached(control: socket.socket) -> None:
    """What the fork does; does not return."""
    try:
        # Ctrl-C in the terminal is for the user's process. `setsid` keeps it away as well, but then
        # Linux gives the fork its own share of the processors, however nice it is.
        os.setpgid(0, 0)
        if os.fork():  # nobody has to wait for the child of a child
            os._exit(0)
    except BaseException:
        leaving.leave(1)
    _run(control)


def _run(control: socket.socket) -> None:
    """What the process does; does not return."""
    code = 1
    try:
        _leave_behind(control.fileno())
        leaving.keep_together()
        _serve(control)
        code = 0
    except BaseException:
        code = 1
    finally:
        leaving.leave(code)


def _leave_behind(kept: int) -> None:
    """Let go of what is the user's: traces, signals, files, where things are printed."""
    sys.settrace(None)
    sys.setprofile(None)
    gc.disable()
    gc.freeze()  # what is there was the user's, and is never given up here
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(kind, signal.SIG_DFL)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"fx2relax")  # what `ps` and `top` show
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    most = max((int(name) for name in os.listdir("/proc/self/fd")), default=kept)
    os.closerange(3, kept)
    os.closerange(kept + 1, most + 1)


def _serve(control: socket.socket) -> None:
    _in_a_thread(_get_ready)
    gc.freeze()
    # The system waits for the children; those wait for their own.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        if not messages.is_ready(control, IDLE):
            return
        word, handed, _, _ = socket.recv_fds(control, 1, 1)
        if not word:
            return
        for number in handed:
            if os.fork() == 0:
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                channel = socket.socket(fileno=number)
                leaving.keep_together()
                _in_a_thread(lambda: _answer(channel))  # noqa: B023  # it is the last one here
                leaving.leave(1)
            os.close(number)


def _get_ready() -> None:
    """Import all that compiling takes, and set LLVM up: compile something small."""
    from fx2relax import drafts, tvm_import
    from fx2relax.options import Options
    from fx2relax.params import InputSpec
    from fx2relax.runtime import native

    tvm_import.load()
    from fx2relax.pipeline import quicker

    quicker.install()
    native.use()
    with FakeTensorMode():
        val = torch.empty(4, 4)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.exp.default, (x,))
    x.meta["val"] = y.meta["val"] = val
    graph.output((y,))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    draft = drafts.draft_of(module, [InputSpec("x", "user", val)], Options(), stored=True)
    draft.entry("torch", workers=1)


def _in_a_thread(work: Callable[[], None]) -> None:
    """Do it as a thread that was not forked would: without modes of PyTorch, or OpenMP's threads.

    Raises:
        RuntimeError: it has failed.
    """
    done = []

    def wholly() -> None:
        work()
        done.append(True)

    thread = threading.Thread(target=wholly)
    thread.start()
    thread.join()
    if not done:
        raise RuntimeError("it has failed")


class _Kept(logging.Handler):
    """Keeps what is logged, for the user's process to log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, record.getMessage()))


def _answer(channel: socket.socket) -> None:
    kept = _Kept()
    _log.handlers, _log.propagate = [kept], False
    gc.enable()
    request, _ = messages.receive(channel)
    sending = threading.Lock()
    threading.Thread(target=_tell, args=(channel, sending), daemon=True).start()
    try:
        said, code = answer(request)
    except BaseException as error:
        said, code = {"refused": f"{type(error).__name__}: {error}"}, b""
    with sending, contextlib.suppress(OSError):
        messages.send(channel, {**said, "log": kept.lines}, code)
        leaving.leave(0)


def _tell(channel: socket.socket, sending: threading.Lock) -> None:
    """Tell how much was computed, so that what stands still is found out; end if nobody listens."""
    while True:
        try:
            with sending:
                messages.send(channel, {"computed": sum(os.times()[:4])})
        except OSError:
            leaving.leave(0)
        time.sleep(TOLD)


def _give_way(wholly: bool) -> None:
    """Let others compute before this thread, and before what it begins from here on.

    Threads that compute one tensor wait for each other: one that has to share its processor, be it
    with what is nice, keeps them all waiting for whole slices of time.

    Args:
        wholly: whether it computes only where a processor has nothing else to do.
    """
    if wholly:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            return
    with contextlib.suppress(OSError):
        os.nice(_NICE)


def answer(request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Compile what a request says.

    Args:
        request: what `client` has asked.

    Returns:
        ``said`` and ``about`` of a `cache.Entry` and the bytes of its library, or why there is
        none, as ``refused``.

    Raises:
        whatever importing and compiling raise.
    """
    from fx2relax import drafts
    from fx2relax.compiling import spelling
    from fx2relax.graph_key import graph_key
    from fx2relax.options import Options
    from fx2relax.runtime import native

    if not request["waited_for"]:
        _give_way(request["yields"])
    torch.set_num_threads(request["threads"])
    graph, specs = spelling.read(request["graph"])
    options = Options(on_unsupported=request["on_unsupported"], library=request["library"])
    if graph_key(graph, specs, options, native.use()) != request["key"]:
        return {"refused": "what decides how it is compiled is not the same here"}, b""
    draft = drafts.draft_of(graph, specs, options, stored=True)
    workers = 2 if request["waited_for"] else 1
    entry = draft.entry(options.library, workers=workers)
    if entry is None:
        return {"refused": "what is compiled of it cannot be stored"}, b""
    return {"said": entry.said, "about": dict(entry.about)}, entry.library
