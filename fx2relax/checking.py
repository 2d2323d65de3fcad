"""Which kernels of a compiled model are wrong: `check`."""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fx2relax import never_slower, stages
from fx2relax.alone import made_of
from fx2relax.errors import ArgumentError
from fx2relax.explaining.build import graph_report, sites_of
from fx2relax.explaining.calls import compiled_call
from fx2relax.explaining.recorder import GraphNotes, Recorder, Variant
from fx2relax.explaining.report import Node
from fx2relax.lockstep import Lockstep
from fx2relax.reproducers import write_part
from fx2relax.runtime.packed_at_use import packed_at_use

_CALLS = 3 * never_slower.SETTLED


@dataclass
class Wrong:
    """One kernel whose result is not PyTorch's.

    Attributes:
        graph: such as "inference 0".
        program: "torch" (with library calls), "generated" or "none".
        number: the kernel's in its program; None for a value that no kernel makes: a view, or
            what a converter returns as it was given.
        kernel: its name.
        nodes: what it computes, with the lines of the source.
        error: the largest error, over the largest value; infinite where shapes, dtypes, NaN or
            infinities differ.
        reason: the same in words.
    """

    graph: str
    program: str
    number: int | None
    kernel: str
    nodes: list[Node]
    error: float
    reason: str
    _part: Any = field(default=None, repr=False)

    def __str__(self) -> str:
        what = "a value" if self.number is None else f"kernel {self.number}, {self.kernel}"
        by = " that no single kernel makes" if self.number is None else ""
        where = f"{what} of {self.graph} ({self.program}){by}"
        lines = [f"{where}: error {self.error:.2g}: {self.reason}"]
        for node in self.nodes:
            lines.append(f"  {node.name} = {node.op}   {node.line}  {node.line.code}".rstrip())
        return "\n".join(lines)


@dataclass
class Failed:
    """A graph, or one of its programs, that PyTorch runs instead.

    Attributes:
        graph: such as "inference 0".
        reason: why, with the line of the source where that is known.
    """

    graph: str
    reason: str

    def __str__(self) -> str:
        return f"{self.graph} runs in PyTorch: {self.reason}"


@dataclass
class Checked:
    """What `check` found.

    Attributes:
        wrong: the kernels that are wrong, in the order in which they run.
        kernels: how many were compared.
        passed: how many could not be, as they make something in between.
        programs: how many programs ran.
        failed: what could not be compiled, or does not take the arguments, and was not compared.
    """

    wrong: list[Wrong]
    kernels: int
    passed: int
    programs: int
    failed: list[Failed] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether nothing is wrong, and all was compiled."""
        return not self.wrong and not self.failed

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        wrong = [
            {
                "graph": each.graph,
                "program": each.program,
                "number": each.number,
                "kernel": each.kernel,
                "nodes": [dataclasses.asdict(node) for node in each.nodes],
                "error": each.error,
                "reason": each.reason,
            }
            for each in self.wrong
        ]
        counts = {"kernels": self.kernels, "passed": self.passed, "programs": self.programs}
        failed = [dataclasses.asdict(each) for each in self.failed]
        return {"right": self.right, "wrong": wrong, "failed": failed, **counts}

    def reproduce(self, folder: str | Path) -> list[Path]:
        """Write a small script for each wrong kernel, which fails in the same way.

        Args:
            folder: made if it is not there. Beside each script lies a file of its tensors.

        Returns:
            the scripts, of the first few; each exits with 1 while the kernel is wrong. A converter
            of yours has to be registered in it.
        """
        made = []
        for number, wrong in enumerate(self.wrong):
            if wrong._part is not None:
                place = Path(folder) / f"wrong{number}"
                graph, own, inputs = wrong._part
                made.append(write_part(graph, own, inputs, place, str(wrong), wrong.program))
        return made

    def __str__(self) -> str:
        seen = f"{self.kernels} kernels of {self.programs} programs compared with PyTorch"
        if not self.programs and not self.failed:
            return f"{seen}: nothing was compiled"
        if self.right:
            return f"{seen}: all right"
        counts = {"wrong": len(self.wrong), "failed": len(self.failed)}
        said = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        return "\n".join([f"{seen}: {said}", *map(str, [*self.wrong, *self.failed])])


def check(
    model: Callable[..., Any],
    *inputs: Any,
    grad: bool = False,
    kwargs: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
    tolerance: float | None = None,
) -> Checked:
    """Compile a model, and compare each kernel with PyTorch while it runs.

    The graph runs in PyTorch beside the program, node by node, and each kernel goes on with
    PyTorch's values, so that every kernel is judged alone. Values are let go of as they are in
    eager, and weights are packed where they are used: the memory it takes is about twice eager's
    for activations, and does not grow with the number of layers.

    Args:
        model: a module or a function, not compiled.
        inputs: what it is called with.
        grad: see `explain`.
        kwargs: named arguments of the call.
        dynamic: see `torch.compile`.
        options: the backend's; `cache` is off.
        tolerance: the largest error over the largest value of a tensor that is rounding; by dtype
            when left out (1e-4 for float32, see `differences.TOLERANCE`). What is beyond it is
            judged by a run in float64: it may be eight times as far from that as PyTorch is, or as
            that moves with the inputs' own rounding. Integers are to be equal but for such.

    Returns:
        what is wrong; all programs that might run are checked, with and without library calls.

    Raises:
        Exception: what calling the model raises.
    """
    call = compiled_call(model, inputs, grad=grad, kwargs=kwargs, dynamic=dynamic, options=options)
    checker = _Checker(tolerance)
    held = model.parameters() if isinstance(model, torch.nn.Module) else ()
    weights = [weight for weight in held if type(weight) is torch.nn.Parameter]
    with stages.observed(checker), packed_at_use(weights):
        for turn in range(_CALLS):
            call()
            if turn and not checker.waiting:
                break
    torch._dynamo.reset()
    if checker.broken is not None:  # the model caught it
        raise checker.broken
    return checker.found()


class _Checker(Recorder):
    """A recorder that runs each program once beside its graph."""

    def __init__(self, tolerance: float | None) -> None:
        super().__init__()
        self.tolerance = tolerance
        self.waiting: set[int] = set()
        self.wrong: list[Wrong] = []
        self.failed: list[Failed] = []
        self.broken: Exception | None = None
        self.kernels = self.passed = self.programs = 0

    def note(self, stage: str, what: dict[str, Any]) -> None:
        """Keep what is compared, and what there is nothing to compare of."""
        super().note(stage, what)
        if stage == "untraced":
            nodes = sum(n.op.startswith("call_") for n in what["graph"].graph.nodes)
            self._fail(f"a graph of {nodes} nodes", what["error"])
        elif stage == "failed":
            self._fail(self._name(), what["error"])
        elif stage == "left":
            self._fail(f"another program of {self._name()}", what["error"])

    def _name(self) -> str:
        return f"{self.graphs[-1].phase} {len(self.graphs) - 1}"

    def _fail(self, graph: str, error: BaseException) -> None:
        self.failed.append(Failed(graph, f"{type(error).__name__}: {str(error).strip()}"))

    def wrap(self, call: Any, what: dict[str, Any]) -> Any:
        """A call that is checked the first time."""
        program = what["program"]
        notes, variant = self.graphs[-1], self.graphs[-1].variants[-1]
        number = len(self.graphs) - 1
        mark = id(program)
        self.waiting.add(mark)
        context = contextvars.copy_context()  # with the user's converters in force

        def checked(arguments: Any) -> Any:
            try:
                if mark not in self.waiting:
                    return call(arguments)
                self.waiting.discard(mark)
                return self._run(notes, variant, number, call, arguments, context)
            except ArgumentError as error:  # such a call runs in PyTorch
                self._fail(f"{notes.phase} {number}", error)
                raise
            finally:
                program.forget()  # each program has weights of its own

        return checked

    def _run(
        self,
        notes: GraphNotes,
        variant: Variant,
        number: int,
        call: Any,
        arguments: Any,
        context: contextvars.Context,
    ) -> Any:
        assert notes.imported is not None
        sites = sites_of(notes, variant)[1]
        results = notes.imported["results"]
        names = [results.get(site.variable) for site in sites]
        groups = [site.nodes for site in sites]
        symbols = [site.symbol for site in sites]
        library = "torch" if variant.library == "torch" else "none"

        def alone(node: torch.fx.Node, inputs: dict[str, Any]) -> Any:
            return context.run(made_of, node, inputs, library)

        lockstep = Lockstep(notes.graph, symbols, names, groups, alone, self.tolerance)
        made = lockstep.run(variant.program, call, arguments)
        if lockstep.failure is not None:
            self.broken = lockstep.failure
            raise lockstep.failure
        self.programs += 1
        self.kernels += lockstep.compared
        self.passed += sum(name is None for name in names)
        if lockstep.differences:
            earlier = [n for one in self.graphs[:number] for n in one.graph.graph.nodes]
            graph = graph_report(notes, number, earlier, variant)
            nodes = {node.name: node for node in graph.nodes}
            for each in lockstep.differences:
                kernel = None if each.place is None else graph.kernels[each.place]
                own = kernel.nodes if kernel is not None else [each.node]
                self.wrong.append(
                    Wrong(
                        graph.name,
                        variant.library,
                        each.place,
                        kernel.name if kernel is not None else "",
                        [nodes[name] for name in own if name in nodes],
                        each.error,
                        each.reason,
                        None if each.inputs is None else (notes.graph, own, each.inputs),
                    )
                )
        return made

    def found(self) -> Checked:
        """What is wrong in all programs."""
        return Checked(self.wrong, self.kernels, self.passed, self.programs, self.failed)


def reproduce(
    model: Callable[..., Any], *inputs: Any, folder: str | Path, **how: Any
) -> list[Path]:
    """`check` a model, and write a small script for each kernel that is wrong.

    Args:
        model: see `check`.
        inputs: the same.
        folder: where the scripts go; see `Checked.reproduce`.
        how: what else `check` takes.

    Returns:
        the scripts; none where all is right.
    """
    return check(model, *inputs, **how).reproduce(folder)
