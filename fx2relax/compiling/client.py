"""Asks the process that compiles, where there can be one.

It is a fork, so that only a process in which one thread runs makes one, and none that holds a GPU,
talks to others, or is so large that a copy of what it writes to would count. In others an
interpreter of its own, which takes seconds to get ready, compiles what nobody waits for: a thread
of this process would keep all others from Python. Whatever goes wrong with a request, this process
compiles within itself.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.fx
from torch.autograd import profiler

from fx2relax import cache, devices, logs, registry, stages
from fx2relax.compiling import messages, process, spelling
from fx2relax.graph_key import SOURCE, graph_key, is_symbolic
from fx2relax.literals import NoSpelling
from fx2relax.locks import own
from fx2relax.options import Options
from fx2relax.params import InputSpec
from fx2relax.runtime import native
from fx2relax.switches import is_on

log = logging.getLogger("fx2relax")

SWITCH = "FX2RELAX_COMPILE_PROCESS"
# A larger process would copy too much of what it writes to while the other one lives.
_LARGEST = 2 << 30
# So many seconds may pass until it is ready, until it is heard of again, and while it is heard to
# compute nothing: it would wait for what was left behind with the user's other threads.
_STARTS, _SILENT, _STANDS = 120.0, 60.0, 30.0
_POLL = 0.2
_SOME = 0.05  # seconds of a processor
# What yields to all others has begun in vain if it computes less than a part of so many seconds.
_YIELDS, _PART = 5.0, 0.4
# Packages whose threads do not take a fork.
_FORKLESS = ("grpc", "jax", "mpi4py", "ray")

_lock = own(sys.modules[__name__], "_lock")
_control: socket.socket | None = None
# Whether it is an interpreter of its own, which nobody is to wait for.
_spawned = False


def begin_early(store: cache.Store | None) -> None:
    """Start the process before there is a graph, in a program that runs for the first time.

    It imports TVM while Dynamo traces. Programs that ran before find what they compiled then.

    Args:
        store: where programs are kept.
    """
    # Whether somebody reads PyTorch's trace is known once it is written to.
    if store is None or not _is_of_use() or stages.are_observed():
        return
    program, *arguments = getattr(sys, "argv", None) or [""]
    if program in ("", "-c"):  # what is typed has no name to be known by
        return
    if store.is_new(_digest(f"{SOURCE} {os.path.abspath(program)} {arguments}")):
        _control_of_process()


def begin_for(
    graph: torch.fx.GraphModule, inputs: Sequence[object], store: cache.Store | None
) -> None:
    """Start the process where a graph of Dynamo's is new: it gets ready while the graph is traced.

    Args:
        graph: Dynamo's.
        inputs: its fake inputs.
        store: where programs are kept.
    """
    if not _is_of_use() or is_watched() or any(map(is_symbolic, inputs)):
        return
    kinds = [(tuple(x.shape), x.dtype) for x in inputs if isinstance(x, torch.Tensor)]
    text = f"{SOURCE} {torch.is_grad_enabled()} {graph.code} {kinds}"
    if store is None or store.is_new(_digest(text)):  # it is known from now on in any case
        _control_of_process()


def _is_of_use() -> bool:
    """Whether there may be a process, and it would get ready beside this one."""
    return _enabled() and _cores() > 1


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def asked(
    graph: torch.fx.GraphModule,
    specs: Sequence[InputSpec],
    options: Options,
    key: str = "",
    *,
    waited_for: bool = True,
) -> Asked | None:
    """Ask the other process for what is compiled of a graph.

    Args:
        graph: see `programs.build`, as for the next two.
        specs: the same.
        options: the same.
        key: what `graph_key` gave for them, if it was asked.
        waited_for: whether somebody waits; otherwise it is done while processors are idle, or
            more slowly where they never are.

    Returns:
        None where it has to be compiled here.
    """
    if not _enabled() or is_watched() or registry.foreign():
        return None
    if devices.of_graph(graph).type != "cpu":
        return None
    try:
        said = spelling.spell(graph, specs)
        key = key or graph_key(graph, specs, options, native.use())
    except NoSpelling as error:
        log.debug("a graph is compiled in this process: %s", error)
        return None
    request = {
        "graph": said,
        "key": key,
        "library": options.library,
        "on_unsupported": options.on_unsupported,
        "threads": torch.get_num_threads(),
        "waited_for": waited_for,
        "yields": not waited_for,
    }
    sent = Asked(request)
    return sent if sent.is_sent else None


class Asked:
    """A request, on which the other process works until it is asked for the answer.

    Args:
        request: see `process.answer`.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self._request, self._process = request, os.getpid()
        self._tries = 2  # settings may have changed, and operators come, since it was made
        self._channel: socket.socket | None = None
        self._why: Exception | None = None
        self._send()

    def _send(self) -> None:
        """Send it, to a new process where there is none left; tell why where that fails."""
        while self._channel is None and self._tries:
            self._tries -= 1
            self._was_there = _control is not None
            channel = _channel(self._request["waited_for"])
            if channel is None:
                self._tries = 0
                break
            try:
                messages.send(channel, self._request)
                self._channel = channel
            except OSError as error:
                channel.close()
                self._failed(error)
        if self._channel is None and self._why is not None:
            why = f"{type(self._why).__name__}: {self._why}"
            log.info("a graph is compiled in this process: %s", why)

    def _failed(self, why: Exception) -> None:
        self._why = why
        if not self._was_there and isinstance(why, _Refused):
            self._tries = 0  # nor would another one take it
        else:
            _forget()

    @property
    def is_sent(self) -> bool:
        """Whether there is an answer to wait for."""
        return self._channel is not None

    def answer(self, checkpoint: Callable[[], None] = lambda: None) -> cache.Entry | None:
        """What is compiled, once; waits for it.

        Args:
            checkpoint: called now and then; what it raises ends the request, and is raised.

        Returns:
            None where it has to be compiled here.
        """
        while self._channel is not None:
            channel, self._channel = self._channel, None
            with channel:
                if os.getpid() != self._process:  # what is answered is for the parent to read
                    return None
                try:
                    return _entry(channel, checkpoint, self._request["yields"])
                except _Starved:
                    self._request["yields"] = False
                    self._tries += 1
                except (_Refused, OSError) as error:
                    self._failed(error)
            self._send()
        return None


class _Refused(RuntimeError):
    """The other process does not compile a graph, and says why."""


class _Starved(RuntimeError):
    """The other process yields to others, which leave it nothing."""


def _entry(channel: socket.socket, checkpoint: Callable[[], None], yields: bool) -> cache.Entry:
    """What the other process answers in the end."""
    heard, limit = time.monotonic(), _STARTS
    computed, at = 0.0, heard
    before, since = 0.0, heard
    while True:
        checkpoint()
        ready = messages.is_ready(channel, _POLL)
        now = time.monotonic()
        if not ready:
            if now - heard > limit:
                raise TimeoutError(f"nothing was heard for {limit:.0f} s")
            continue
        heard, limit = now, _SILENT
        said, content = messages.receive(channel)
        if "computed" in said:
            if said["computed"] - computed > _SOME:
                computed, at = said["computed"], now
            elif now - at > _STANDS:
                raise TimeoutError(f"nothing was computed for {_STANDS:.0f} s")
            if yields and now - since > _YIELDS:
                if said["computed"] - before < _PART * (now - since):
                    raise _Starved
                before, since = said["computed"], now
            continue
        for level, message in said["log"]:
            log.log(level, "%s", message)
        if "refused" in said:
            raise _Refused(said["refused"])
        return cache.Entry(content, said["said"], said["about"])


def _channel(waited_for: bool) -> socket.socket | None:
    """A socket whose other end the process has; starts the process where there is none."""
    for _ in range(2):
        control = _control_of_process(waited_for)
        if control is None:
            return None
        try:
            here, there = socket.socketpair()
        except OSError as error:
            log.info("there is no channel to the process that compiles: %s", error)
            return None
        with there:
            try:
                messages.hand(control, there.fileno())
            except OSError:  # it has ended
                here.close()
                _forget()
                continue
        here.settimeout(_SILENT)
        return here
    return None


def _control_of_process(waited_for: bool = True) -> socket.socket | None:
    global _control, _spawned
    with _lock:
        if _control is None and _may_fork():
            _spawned = False
            try:
                with warnings.catch_warnings():
                    # Python warns of threads, of which it counts those of OpenMP, too.
                    warnings.simplefilter("ignore")
                    _control = process.begin()
            except OSError as error:
                log.info("there is no process to compile in: %s", error)
        elif _control is None and not waited_for and _may_spawn():
            _spawned = True
            try:
                _control = process.spawn()
            except (OSError, subprocess.SubprocessError) as error:
                log.info("there is no interpreter to compile in: %s", error)
        return None if waited_for and _spawned else _control


def _forget() -> None:
    global _control
    with _lock:
        if _control is not None:
            _control.close()
        _control = None


def _in_child() -> None:
    """The process belongs to the parent."""
    global _control
    if _control is not None:
        _control.close()
    _control = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _enabled() -> bool:
    return sys.platform == "linux" and is_on(SWITCH)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def is_watched() -> bool:
    """Whether somebody wants to see what compiling goes through."""
    return stages.are_observed() or logs.are_wanted() or profiler._is_profiler_enabled


def _may_fork() -> bool:
    # PyTorch has tqdm begin a thread that does nothing but wait.
    threads = [t for t in threading.enumerate() if not type(t).__module__.startswith("tqdm.")]
    alone = threads == [threading.main_thread()]
    held = torch.cuda.is_initialized() or any(m in sys.modules for m in _FORKLESS)
    return alone and not held and not _is_distributed() and _resident() <= _LARGEST


def _may_spawn() -> bool:
    # An application that holds Python within itself would be started in the place of Python.
    is_python = os.path.basename(sys.executable or "").startswith("python")
    return is_python and not getattr(sys, "frozen", False) and not _is_distributed()


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _resident() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return _LARGEST + 1
    return pages * os.sysconf("SC_PAGE_SIZE")
