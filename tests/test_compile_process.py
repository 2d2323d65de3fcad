"""Graphs that are compiled in a process of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from fresh_process import environment, run
from torch.fx.experimental.proxy_tensor import make_fx

from fx2relax.compiling import messages, process, spelling
from fx2relax.graph_inputs import plain_specs
from fx2relax.graph_key import graph_key
from fx2relax.literals import NoSpelling
from fx2relax.options import Options

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it is a fork on Linux alone")

_BEGIN = """
import logging, os, signal, sys, threading
import torch, fx2relax
torch.manual_seed(0)
lines = []
class Kept(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
log = logging.getLogger("fx2relax")
log.addHandler(Kept())
log.setLevel(logging.INFO)
net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
x = torch.randn(16, 32)
def is_right(f=net, *arguments, **options):
    arguments = arguments or (x,)
    fast = torch.compile(f, backend="relax", **options)
    for _ in range(3):
        torch.testing.assert_close(fast(*arguments), f(*arguments))
    assert fx2relax.wait_for_compilation(300)
    torch.testing.assert_close(fast(*arguments), f(*arguments))
def here():
    return "tvm" in sys.modules
def others():
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            ours = os.environ["FX2RELAX_CACHE_DIR"] in open(f"/proc/{name}/environ").read()
            if ours and open(f"/proc/{name}/comm").read() == "fx2relax\\n":
                found.append(int(name))
        except OSError:
            pass
    return found
def kill_the_other():
    for pid in others():
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
"""


def say(script: str, store: Path) -> str:
    return run(_BEGIN + textwrap.dedent(script), store)


def _aten(function: Callable[..., Any], *inputs: Any, mode: str = "fake") -> torch.fx.GraphModule:
    flat = lambda *x: pytree.tree_leaves(function(*x))  # noqa: E731
    return make_fx(torch.func.functionalize(flat), tracing_mode=mode)(*inputs)


def _complex(x: Any) -> Any:
    return torch.fft.rfft(x).abs().sum(-1)


def _window(x: Any) -> Any:
    return x * torch.hann_window(5) + torch.tensor([1.0, float("nan"), 2.0, -0.0, float("inf")])


def _written(x: Any) -> Any:
    y = x.clone()
    y[1:, ::2] = 0
    return y, y.t(), x.view(torch.int32)[0]


def _parts(x: Any) -> Any:
    return torch.split(x, 2), x.topk(2), x.to(torch.bfloat16).sum(), x > 0


GRAPHS: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (torch.nn.functional.gelu, ((4, 5),)),
    (_complex, ((3, 8),)),
    (_window, ((4, 5),)),
    (_written, ((4, 6),)),
    (_parts, ((4, 5),)),
    (lambda x: torch.empty_strided((2, 3), (1, 4)).zero_() + x, ((2, 3),)),
    (lambda x: x[None].expand(3, -1, -1).unfold(2, 2, 1), ((4, 5),)),
    (lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x), ((2, 3, 4, 8),)),
    (lambda x: x.sum(), ((0, 5),)),
    (lambda x: x * 2, ((),)),
]


@pytest.mark.parametrize(("function", "shapes"), GRAPHS)
def test_a_graph_is_read_as_it_was_spelled(function, shapes) -> None:
    graph = _aten(function, *(torch.randn(shape) for shape in shapes))
    specs = plain_specs(graph)
    said = json.loads(json.dumps(spelling.spell(graph, specs)))
    read, inputs = spelling.read(said)
    options = Options(library="torch")
    assert graph_key(read, inputs, options) == graph_key(graph, specs, options)
    assert [n.name for n in read.graph.nodes] == [n.name for n in graph.graph.nodes]


@pytest.mark.parametrize("function", [_parts, _window, torch.nn.functional.gelu])
def test_what_is_answered_is_a_program(function) -> None:
    graph = _aten(function, torch.randn(4, 5))
    specs, options = plain_specs(graph), Options(library="torch")
    request = {
        "graph": spelling.spell(graph, specs),
        "key": graph_key(graph, specs, options, True),
        "library": "torch",
        "on_unsupported": "torch",
        "threads": torch.get_num_threads(),
        "waited_for": True,
        "yields": False,
    }
    said, code = process.answer(request)
    assert code.startswith(b"\x7fELF")
    assert {"imported", "guards", "calling", "census", "kernels"} == set(said["said"])
    said, code = process.answer({**request, "key": "another"})
    assert (list(said), code) == (["refused"], b"")


def test_graphs_with_symbols_and_large_constants_are_not_taken() -> None:
    graph = _aten(lambda x: x + torch.tensor([1.5] * 70000), torch.randn(70000))
    with pytest.raises(NoSpelling, match="small tensor"):
        spelling.spell(graph, plain_specs(graph))
    graph = _aten(lambda x: x.reshape(-1), torch.randn(4, 5), mode="symbolic")
    with pytest.raises(NoSpelling, match="symbolic"):
        spelling.spell(graph, plain_specs(graph))


def test_the_compiler_stays_out(tmp_path: Path) -> None:
    """Of inference with both programs, and of training; a second process finds them all."""
    script = """
        with torch.no_grad():
            is_right()
        before = [p.clone() for p in net.parameters()]
        fast = torch.compile(net, backend="relax")
        fast(x).square().sum().backward()
        mine = [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        net(x).square().sum().backward()
        for one, p in zip(mine, net.parameters()):
            torch.testing.assert_close(one, p.grad, rtol=1e-4, atol=1e-4)
        stats = fx2relax.stats()
        print(here(), stats["graphs"], stats["cache_hits"] > 0)
    """
    assert say(script, tmp_path) == "False 3 False"
    assert say(script, tmp_path) == "False 3 True"


def test_without_a_store(tmp_path: Path) -> None:
    script = """
        with torch.no_grad():
            is_right(options={"cache": False, "library": "torch"})
        print(here())
    """
    assert say(script, tmp_path) == "False"
    assert not list((tmp_path / "programs").glob("*.program"))


def test_it_begins_before_the_trace_of_what_is_new(tmp_path: Path) -> None:
    """In a program that runs for the first time, or of a graph that is; else not at all."""
    (tmp_path / "programs").mkdir(mode=0o700)
    (tmp_path / "programs" / "other.program").touch()
    script = """
        import traceback
        from fx2relax.compiling import process
        sys.argv = ["program.py"]
        begin, begun = process.begin, []
        def noted():
            frames = [frame.name for frame in traceback.extract_stack()]
            begun.extend(name for name in ("begin_early", "begin_for") if name in frames)
            return begin()
        process.begin = noted
        with torch.no_grad():
            is_right(WHAT, options={"library": "torch"})
        print(*begun, here())
    """
    whats = ("net", "net", "lambda x: net(x) + 1")
    said = [say(script.replace("WHAT", f"{what}, x"), tmp_path) for what in whats]
    assert said == ["begin_early False", "False", "begin_for False"]


# What each does has to be compiled here, or anew in a process that knows of it.
HERE = {
    "a converter of the user's": (
        """
        from fx2relax.converters.common import op
        own = {torch.ops.aten.relu.default: lambda x: op.nn.relu(x)}
        is_right(torch.relu, x, options={"call_function_map": own})
        """,
        True,
    ),
    "symbolic sizes": ("is_right(lambda x: x * 2 + 1, x, dynamic=True)", True),
    "threads that run": (
        """
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        with torch.no_grad():
            is_right()
        """,
        True,
    ),
    "a setting that has changed": (
        """
        with torch.no_grad():
            is_right(options={"library": "torch"})
            torch.use_deterministic_algorithms(True)
            is_right(lambda x: net(x) + 1, x, options={"library": "torch"})
            torch.set_num_threads(1)
            is_right(lambda x: net(x) + 2, x, options={"library": "torch"})
        """,
        False,
    ),
    "an operator that has come": (
        """
        is_right(lambda x: x + 1, x)
        @torch.library.custom_op("own::twice", mutates_args=())
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2
        twice.register_fake(torch.empty_like)
        is_right(lambda x: twice(x) + 1, x)
        """,
        False,
    ),
    "modes of PyTorch": (
        """
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"), torch.inference_mode():
            is_right(lambda x: x.sin() + 1, x)
        """,
        False,
    ),
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("script", "compiled_here"), HERE.values(), ids=list(HERE))
def test_what_may_be_asked_for(tmp_path: Path, script: str, compiled_here: bool) -> None:
    # A store that is not empty: the process is made when a graph needs it.
    (tmp_path / "programs").mkdir(mode=0o700)
    (tmp_path / "programs" / "other.program").touch()
    # A thread that waits is begun before there is a process.
    assert say(textwrap.dedent(script) + "\nprint(here())", tmp_path) == str(compiled_here)


def test_a_process_that_is_killed(tmp_path: Path) -> None:
    """The graph is compiled, whenever it goes."""
    script = """
        from fx2relax.compiling import client
        send = client.messages.send
        def killing(channel, request):
            send(channel, request)
            kill_the_other()
        client.messages.send = killing
        with torch.no_grad():
            is_right()
        print(here(), any("compiled in this process" in line for line in lines))
    """
    assert say(script, tmp_path) == "True True"


def test_a_process_that_has_ended_meanwhile(tmp_path: Path) -> None:
    """Where a write to what is closed ends the user's process, and many files are open."""
    script = """
        import resource
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
        held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1500)]
        with torch.no_grad():
            is_right()
            print(here(), end=" ")
            kill_the_other()
            is_right(lambda x: x.sin() @ x.mT, x)
        print(here())
    """
    assert say(script, tmp_path) == "False False"


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """Neither by a process that ends, nor by one that is killed; nor does it hold its output.

    Both end while another program is compiled, and there are files of it.
    """
    script = textwrap.dedent(_BEGIN) + textwrap.dedent("""
        import pathlib, tempfile, time
        def objects():
            return set(pathlib.Path(tempfile.gettempdir()).glob("**/kernels*.o"))
        layers = []
        for width in range(32, 48):  # which takes longer than a second
            layers += [torch.nn.Linear(width, width + 1), torch.nn.Softmax(-1)]
        fast = torch.compile(torch.nn.Sequential(*layers), backend="relax")
        with torch.no_grad():
            fast(x)
            before = objects()
            fast(x)  # another program is begun
        limit = time.monotonic() + 100
        while not objects() - before and time.monotonic() < limit:
            time.sleep(0.002)
        print(here(), flush=True)
        if sys.argv[1] == "killed":
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    for ending in ("ends", "killed"):
        command = [sys.executable, "-c", script, ending]
        temporary = tmp_path / f"temporary {ending}"
        temporary.mkdir()
        done = subprocess.run(
            command,
            env=environment(tmp_path / ending, TMPDIR=str(temporary)),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.stdout == "False\n", done.stderr
        limit = time.monotonic() + 30
        while _with_folder(tmp_path / ending) and time.monotonic() < limit:
            time.sleep(0.1)
        assert _with_folder(tmp_path / ending) == []
        assert list(temporary.glob("fx2relax-*")) == []


def _with_folder(store: Path) -> list[int]:
    """The processes that have this folder for a cache."""
    found = []
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            held = Path(f"/proc/{number}/environ").read_bytes()
        except OSError:
            continue
        if f"FX2RELAX_CACHE_DIR={store}\0".encode() in held:
            found.append(int(number))
    return found


def test_ctrl_c_while_it_compiles(tmp_path: Path) -> None:
    script = """
        import os, signal
        from fx2relax.compiling import client
        signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been ignored
        receive = client.messages.receive
        def interrupted(channel):
            os.kill(os.getpid(), signal.SIGINT)
            return receive(channel)
        client.messages.receive = interrupted
        fast = torch.compile(net, backend="relax")
        try:
            fast(x)
            print("not interrupted")
        except KeyboardInterrupt:
            client.messages.receive = receive
            torch.testing.assert_close(fast(x), net(x))
            print("interrupted", here())
    """
    assert say(script, tmp_path) == "interrupted False"


def test_messages_go_through_whole() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(30)
        messages.send(here, {"a": [1, None, "ä"]}, b"\0" * 1000)
        assert messages.receive(there) == ({"a": [1, None, "ä"]}, b"\0" * 1000)
        here.close()
        with pytest.raises(messages.Ended):
            messages.receive(there)
