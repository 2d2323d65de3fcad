"""The entry point of `torch.compile(backend="relax")`."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx
from torch._dynamo.callback import on_compile_end, on_compile_start
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import TorchDynamoException
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import _disable_current_modes

import fx2relax.required  # noqa: F401  # comes first
from fx2relax import (
    ahead,
    aot,
    background,
    collectives,
    decompositions,
    devices,
    drafts,
    kept,
    logs,
    never_slower,
    programs,
    registry,
    rivals,
    rng_states,
    stages,
    tally,
    trace_store,
    traced,
    views_again,
)
from fx2relax import covariance as covariance  # puts its kernel in the place of PyTorch's
from fx2relax.alternatives import HEAVY, Alternatives, Call, Heavy
from fx2relax.boxed import boxed, guarded, of_tuple
from fx2relax.clocks import Clock
from fx2relax.collecting import begin_tracing, end_tracing, set_aside
from fx2relax.errors import BuildFailure, Fx2RelaxError, source_line
from fx2relax.gpu_indices import make_on_gpu
from fx2relax.graph_inputs import metadata_of_trace, plain_specs, written_inputs
from fx2relax.layouts import overlaps
from fx2relax.names import weight_names
from fx2relax.on_gpu import on_gpu
from fx2relax.options import Options
from fx2relax.overlapping import overlapping_write, write_beside
from fx2relax.params import InputSpec
from fx2relax.reproducers import write_reproducer
from fx2relax.runtime.program import Program
from fx2relax.storages import whole_inputs
from fx2relax.taking_turns import Turns
from fx2relax.whole import whole_operators
from fx2relax.writes import copy_kept, take_writes, writing

log = logging.getLogger("fx2relax")

# Dynamo leaves recurrent modules to eager unless it is told that the backend takes them.
torch._dynamo.config.allow_rnn = True
traced.install()
logs.install()
on_compile_start(begin_tracing)  # until `torch._dynamo.reset()`, which forgets them
on_compile_end(end_tracing)


def relax(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph; what ``torch.compile(model, backend="relax")`` calls.

    Args:
        graph_module: Dynamo's graph.
        example_inputs: its inputs.
        mode: the mode given to `torch.compile`.
        options: see `fx2relax.options.Options`.

    Raises:
        OptionError: an unknown option, value or mode.
        UnsupportedOpError, ImportFailure, BuildFailure: with ``on_unsupported="raise"`` only.
    """
    settings = Options.make(options, mode), weight_names(graph_module)
    if ahead.is_asked_for():
        return ahead.AheadOfTime(_compiled, graph_module, example_inputs, settings)
    with set_aside():  # as it is already, but after a reset of Dynamo
        return _compiled(graph_module, example_inputs, settings)


def _compiled(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: tuple[Options, list[tuple[str, str] | None]],
) -> Callable[..., Any]:
    """`relax` with options read, and the names of the weights among the inputs."""
    chosen, names = settings
    stages.note("captured", graph=graph_module)
    with registry.overrides(chosen.converters), whole_operators():
        kept_module = kept.keep_whole(graph_module, registry.kept_whole())
        compiler = _Compiler(chosen, names, collectives.is_shared(graph_module))
        if kept_module is graph_module and not compiler.shared:
            usual = rivals.with_library(chosen)
            compiler.trace = trace_store.trace_of(graph_module, example_inputs, usual)
            found = compiler.trace.find() if compiler.trace is not None else None
            if found is not None:
                return compiler.contest(aot.called(compiler.found(found)), graph_module)
        programs.expect(graph_module, example_inputs, chosen)
        depth = torch._C._functorch.get_dynamic_layer_stack_depth()
        try:
            _refuse_writes(graph_module)
            with _tangent_strides(graph_module):
                compiled = aot.traced(
                    kept_module,
                    example_inputs,
                    fw_compiler=compiler.forward,
                    bw_compiler=compiler.backward,
                    inference_compiler=compiler.inference,
                    decompositions=decompositions.asking_table(),
                    partition_fn=min_cut_rematerialization_partition,
                    keep_inference_input_mutations=True,
                )
                return compiler.contest(compiled, graph_module)
        except (Fx2RelaxError, TorchDynamoException):
            raise
        except Exception as error:
            # AOTAutograd has operators that it does not take apart, under any backend.
            aot.leave_transforms(depth)
            if chosen.on_unsupported == "raise":
                raise
            stages.note("untraced", graph=graph_module, error=error)
            log.warning(
                "a graph of %d nodes could not be traced and runs in PyTorch: %s: %s",
                len(graph_module.graph.nodes),
                type(error).__name__,
                str(error).strip(),
            )
            tally.left_to_eager(graph_module, 0.0)
            return graph_module.forward


def _tangent_strides(graph_module: torch.fx.GraphModule) -> contextlib.AbstractContextManager[Any]:
    """AOTAutograd lays gradients out as the outputs are; not where output elements share memory.

    A gradient laid out as such an output (a window of `unfold`) loses all but one of its values.
    """
    output = next(n for n in graph_module.graph.nodes if n.op == "output")
    values = [n.meta.get("example_value") for n in output.all_input_nodes]
    if not any(isinstance(v, torch.Tensor) and overlaps(v) for v in values):
        return contextlib.nullcontext()
    return functorch_config.patch(guess_tangent_strides_as_outputs=False)  # type: ignore[no-any-return]


class _Untraceable(RuntimeError):
    """What AOTAutograd traces, and PyTorch then does not run."""


def _refuse_writes(graph_module: torch.fx.GraphModule) -> None:
    for find, what in (
        (overlapping_write, "a write where elements of a tensor share memory"),
        (write_beside, "a write to memory that as_strided names beside an input"),
    ):
        node = find(graph_module)
        if node is not None:
            raise _Untraceable(f"{what}, at {source_line(node) or node.format_node()}")


class _Compiler:
    """Compiles the ATen graphs that AOTAutograd makes of one Dynamo graph."""

    def __init__(self, options: Options, names: list[tuple[str, str] | None], shared: bool) -> None:
        self.options = options
        self.names = names
        self.shared = shared  # with other processes
        self.context = contextvars.copy_context()
        self.verdicts: never_slower.Verdicts | None = None
        self.alternatives: Alternatives | None = None
        self.device = devices.CPU
        self.trace: trace_store.Trace | None = None

    def contest(self, compiled: Any, graph_module: torch.fx.GraphModule) -> Callable[..., Any]:
        """What was compiled of Dynamo's graph, unless eager turns out to be faster."""
        if self.verdicts is None:
            return compiled  # type: ignore[no-any-return]
        nodes = sum(n.op.startswith("call_") for n in graph_module.graph.nodes)
        contest = never_slower.Contest(
            aot.bare(compiled),
            graph_module.forward,
            nodes,
            self.verdicts,
            self.alternatives,
            Clock(self.device),
            self.device.type == "cpu" and never_slower.is_roomy(graph_module),
        )
        stages.note("contest", contest=contest)
        return aot.untraced(contest)

    def inference(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        metadata = metadata_of_trace()
        if metadata is not None:
            views_again.of_inputs(graph, metadata)
        infos = metadata.input_info if metadata is not None else []
        mutates = any(i.mutates_data or i.mutates_metadata for i in infos)
        watch = self._may_time() and metadata is not None
        watch = watch and never_slower.leaves_no_trace(graph, mutates)
        specs = self._specs(graph, written_inputs(metadata), freeze=True)
        spelled = None
        if self.trace is not None and metadata is not None:
            spelled = self.trace.spelled(graph, specs, metadata)
        with stages.kept("cache") as told:
            call = self._compile(graph, specs, "inference", watch)
        if self.trace is not None and spelled is not None and told["cache"]:
            self.trace.keep(spelled, told["cache"][0]["key"])
        return call

    def found(self, traced: trace_store.Traced) -> Any:
        """`inference` of a graph that an earlier process traced."""
        specs = self._specs(traced.graph, traced.written, freeze=True)
        watch = self._may_time() and not traced.written
        return self._compile(traced.graph, specs, "inference", watch)

    def forward(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        metadata = metadata_of_trace()
        if metadata is not None:
            views_again.of_inputs(graph, metadata)
            copy_kept(graph, metadata)
        return self._compile(
            graph, self._specs(graph, written_inputs(metadata), freeze=False), "forward"
        )

    def backward(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        # The backward graph may be compiled when it is first run, outside of the scope of the
        # overrides that were in force for the forward; and in two threads at once.
        with compile_lock:
            return self.context.copy().run(self._compile, graph, plain_specs(graph), "backward")

    def _specs(
        self, graph: torch.fx.GraphModule, written: frozenset[int], freeze: bool
    ) -> list[InputSpec]:
        specs = plain_specs(graph)
        for position, spec in enumerate(specs):
            tensor = isinstance(spec.val, torch.Tensor)
            if position in written and tensor and overlaps(spec.val):
                raise _Untraceable(f"{spec.name}, which is written to, has elements in one place")
        if len(specs) != len(self.names):
            return specs
        for position, (spec, name) in enumerate(zip(specs, self.names, strict=True)):
            if name is None:
                continue
            spec.name, kind = name
            if isinstance(spec.val, torch.Tensor):
                spec.kind = kind if freeze else "user"
            spec.mutated = position in written
        return specs

    def _compile(
        self,
        graph: torch.fx.GraphModule,
        specs: list[InputSpec],
        phase: str,
        watch: bool = False,
    ) -> Any:
        start = time.perf_counter()
        stages.note("graph", graph=graph, specs=specs, phase=phase)
        writes = take_writes(graph, specs)
        try:
            # AOTAutograd compiles under its fake tensor mode; weights and constants are real.
            with _disable_current_modes(), stages.recorded(f"compile the {phase} graph"):
                program = self._build(graph, specs, start, phase, watch)
        except Exception as error:
            if self.options.on_unsupported == "raise":
                if isinstance(error, Fx2RelaxError):
                    raise
                raise BuildFailure(f"TVM could not build this graph: {error}") from error
            eager = self._eager(graph, error, time.perf_counter() - start)
            return boxed(writing(of_tuple(eager), writes))
        call = collectives.waiting(guarded(program, graph), collectives.waited_inputs(graph))
        return boxed(writing(call, writes))

    def _build(
        self,
        graph: torch.fx.GraphModule,
        specs: list[InputSpec],
        start: float,
        phase: str,
        watch: bool,
    ) -> Call:
        make_on_gpu(graph)
        device = self.device = devices.of_graph(graph)
        # The tuner measures kernels for the processor.
        options = self.options if device.type == "cpu" else replace(self.options, tune=None)
        collectives.refuse_one_sided(graph)
        rng_states.fill_in(graph)
        whole_inputs(graph.graph, specs)

        def callable_of(built: drafts.Built) -> Call:
            what = (built.imported, built.executable, device, built.calling, built.kernels)
            program = Program(*what, trains=phase != "inference")
            stages.note("program", program=program, built=built)
            wrapped: Call = stages.wrapped(program.call, program=program)
            if device.type == "cpu":
                return Heavy.of(program, wrapped) if program.made_of >= HEAVY else wrapped
            replay = phase == "inference" and options.mode == "reduce-overhead"
            return on_gpu(wrapped, graph, specs, device, options, replay=replay)

        if not watch and not self._takes_turns():
            built = programs.build(graph, specs, rivals.with_library(options))
            call = callable_of(built)
            tally.compiled(built, phase, time.perf_counter() - start)
            return call
        if watch and self._may_return_first(graph):
            begun = rivals.begin(graph, specs, options, callable_of)
        else:
            begun = rivals.enter(graph, specs, options, callable_of)
        if isinstance(begun, rivals.Awaited):
            # Dynamo makes its guards meanwhile.
            spent = time.perf_counter() - start
            alternatives = Alternatives.awaited(lambda: self._arrived(graph, begun, phase, spent))
        else:
            alternatives = begun.alternatives
            tally.compiled(begun.built, phase, time.perf_counter() - start, alternatives)
        if watch:
            self.verdicts, self.alternatives = begun.verdicts, alternatives
            return alternatives.call
        return Turns(alternatives, begun.verdicts, Clock(device))

    def _may_return_first(self, graph: torch.fx.GraphModule) -> bool:
        """Whether this may return before the graph is compiled, and tell of errors at the call."""
        at_once = self.options.on_unsupported == "raise" or self.options.tune is not None
        at_once = at_once or ahead.is_asked_for() or programs.is_symbolic_graph(graph)
        return background.enabled() and not at_once

    def _arrived(
        self, graph: torch.fx.GraphModule, begun: rivals.Awaited, phase: str, spent: float
    ) -> Alternatives:
        """The programs that were awaited; eager alone where they cannot be compiled."""
        start = time.perf_counter()
        try:
            with _disable_current_modes():
                entered = begun.entered()
        except Exception as error:
            eager = self._eager(graph, error, spent + time.perf_counter() - start)
            return Alternatives({never_slower.EAGER: of_tuple(eager)})
        seconds = spent + time.perf_counter() - start
        tally.compiled(entered.built, phase, seconds, entered.alternatives)
        return entered.alternatives

    def _may_time(self) -> bool:
        # Which way is taken is a matter of time, and their sums differ in the last digits.
        alike = self.shared or torch.are_deterministic_algorithms_enabled()
        return never_slower.enabled(self.options.never_slower) and not alike

    def _takes_turns(self) -> bool:
        ways = self.options.library == "auto" or self.options.tune is not None
        return ways and self._may_time()

    def _eager(self, graph: torch.fx.GraphModule, error: Exception, seconds: float) -> Any:
        """Run a graph that could not be compiled in PyTorch, and say so once."""
        stages.note("failed", error=error)
        path = write_reproducer(graph, error)
        log.warning(
            "a graph of %d nodes could not be compiled and runs in PyTorch: %s: %s\n"
            "  reproducer: %s",
            len(graph.graph.nodes),
            type(error).__name__,
            str(error).strip(),
            path,
        )
        tally.left_to_eager(graph, seconds)
        # An interpreter holds the values of the call that it runs: each call has one of its own.
        return lambda *arguments: torch.fx.Interpreter(graph).run(*arguments)


programs.expect_any()  # `torch.compile` imports this module when it looks the backend up
