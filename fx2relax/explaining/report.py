"""What a report holds, as plain data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Line:
    """A line of the user's source.

    Attributes:
        file: its path.
        number: in the file, from 1.
        code: what it says.
    """

    file: str = ""
    number: int = 0
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.number}" if self.file else ""


@dataclass
class Node:
    """A node of a graph.

    Attributes:
        name: in the graph.
        op: the operator, such as ``aten.addmm.default``.
        line: where the user wrote it.
        layer: the path of the module whose code it is, such as ``blocks.0.conv1``.
        shape: of what it makes, as text with its dtype.
        relax: the Relax operators that it was imported as.
        how: "generated", "library", "torch", "weights" (done once, on weights alone) or "nothing"
            (it names what is there already, or never changes).
        why: why it runs in PyTorch, or why there is nothing to do.
        kernels: the numbers of the kernels that compute it.
        operations: floating-point operations.
        rest: those of a kernel that goes on where another has begun, such as the bias of a product
            of the library's: one for each element.
    """

    name: str
    op: str
    line: Line
    layer: str = ""
    shape: str = ""
    relax: list[str] = field(default_factory=list)
    how: str = "generated"
    why: str = ""
    kernels: list[int] = field(default_factory=list)
    operations: int = 0
    rest: int = 0


@dataclass
class Kernel:
    """One call that a program makes.

    Attributes:
        number: its place in the program, from 0.
        name: the generated kernel's, or the library call's.
        how: "generated", "library" or "torch".
        nodes: the names of the nodes that it computes.
        operations: floating-point operations.
        bytes: of what it reads and writes, each once.
        seconds: what one call takes; None until it was measured.
    """

    number: int
    name: str
    how: str
    nodes: list[str]
    operations: int = 0
    bytes: int = 0
    seconds: float | None = None


@dataclass
class Weights:
    """What becomes of the weights.

    Attributes:
        count: how many tensors.
        bytes: of all of them.
        made: how many tensors the work on weights alone makes of them (packed, folded, cast).
        made_bytes: of these, as far as their sizes are known.
    """

    count: int = 0
    bytes: int = 0
    made: int = 0
    made_bytes: int = 0


@dataclass
class Graph:
    """One compiled graph.

    Attributes:
        name: such as "inference 0".
        phase: "inference", "forward" or "backward".
        runs: "torch" (with library calls), "generated", "none", or "eager".
        why: why it runs so.
        nodes: in order.
        kernels: in the order in which they run.
        weights: what becomes of them.
        memory: bytes of the storages that intermediate values share.
        unplanned: bytes that these values would take if each had its own.
        stages: seconds of compiling, by stage.
        fx, relax, tir: the graph, the imported module and the fused kernels as text.
        measured: seconds of one run of the program; None until it was measured.
        outside: seconds of a run that are spent between kernels: in the virtual machine, on memory,
            on arguments and results.
    """

    name: str
    phase: str
    runs: str
    why: str = ""
    nodes: list[Node] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    weights: Weights = field(default_factory=Weights)
    memory: int = 0
    unplanned: int = 0
    stages: dict[str, float] = field(default_factory=dict)
    fx: str = ""
    relax: str = ""
    tir: str = ""
    measured: float | None = None
    outside: float | None = None


@dataclass
class Break:
    """A place where the model falls into two graphs.

    Attributes:
        reason: PyTorch's words.
        line: the user's.
    """

    reason: str
    line: Line


@dataclass
class Limits:
    """What a machine can do.

    Attributes:
        bytes: a second, from memory.
        operations: floating-point operations a second, in float32.
        threads: with as many threads.
    """

    bytes: float
    operations: float
    threads: int


@dataclass
class Data:
    """All that a report says.

    Attributes:
        model: the name of its class or function.
        graphs: in the order in which they were compiled.
        breaks: between graphs.
        eager: graphs that run in PyTorch as a whole, with the reason.
        seconds: from the first call's start to its end, compiling included.
        limits: None until it was measured.
        call: seconds of one call of the model; None until it was measured.
        outside: seconds of a call that are spent outside of kernels.
        calling: of these, seconds outside of the graphs' programs: in PyTorch's guards, in
            autograd, in what the model does between graphs.
        measured: what the times are times of, in words; empty until it was measured.
    """

    model: str
    graphs: list[Graph] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    eager: list[str] = field(default_factory=list)
    seconds: float = 0.0
    limits: Limits | None = None
    call: float | None = None
    outside: float | None = None
    calling: float | None = None
    measured: str = ""

    def to_json(self) -> str:
        """As JSON, in the fields' names."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @property
    def kernels(self) -> list[Kernel]:
        """Of all graphs."""
        return [k for graph in self.graphs for k in graph.kernels]

    def overheads(self) -> list[tuple[str, float]]:
        """What of a call is spent outside of kernels, and the seconds; empty before `measure`."""
        if self.outside is None or self.calling is None:
            return []
        between = max(0.0, self.outside - self.calling)
        return [
            ("between kernels: virtual machine, memory, arguments", between),
            ("around the graphs: guards, autograd, the model's Python", self.calling),
        ]

    def by_line(self) -> list[tuple[Line, float, list[str]]]:
        """Lines, the seconds of the kernels that compute them, and their operators.

        A kernel of several lines is shared by their nodes' operations, or evenly where none
        counts. The lines that take the longest come first; without times, in the graphs' order.
        """
        return _shares(self.graphs, lambda node: node.line)

    def by_layer(self) -> list[tuple[str, float, list[str]]]:
        """The same for the modules' paths."""
        return _shares(self.graphs, lambda node: node.layer or "(model)")


def operations(kernels: list[list[Node]]) -> list[list[int]]:
    """Floating-point operations of each node in each of the kernels that compute it, in order."""
    begun: set[str] = set()
    counts = []
    for nodes in kernels:
        counts.append([node.rest if node.name in begun else node.operations for node in nodes])
        begun.update(node.name for node in nodes)
    return counts


def _shares(graphs: list[Graph], key: Callable[[Node], Any]) -> list[tuple[Any, float, list[str]]]:
    seconds: dict[Any, float] = {}
    operators: dict[Any, dict[str, None]] = {}
    for graph in graphs:
        nodes = {node.name: node for node in graph.nodes}
        for node in graph.nodes:
            seconds.setdefault(key(node), 0.0)
            operators.setdefault(key(node), {})[node.op.removesuffix(".default")] = None
        computed = [[nodes[name] for name in k.nodes if name in nodes] for k in graph.kernels]
        for kernel, own, counts in zip(graph.kernels, computed, operations(computed), strict=True):
            total = sum(counts)
            for node, count in zip(own, counts, strict=True):
                share = count / total if total else 1 / len(own)
                seconds[key(node)] += share * (kernel.seconds or 0.0)
    rows = [(mark, spent, list(operators[mark])) for mark, spent in seconds.items()]
    return sorted(rows, key=lambda row: -row[1])
