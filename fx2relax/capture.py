"""Any FX graph as a functional ATen graph with fake values on its nodes.

The graph is run once under PyTorch's own tracing: fake tensors learn shapes and dtypes,
functionalisation turns writes into values, the caller's decompositions are applied, and calls kept
whole stay whole. Weights become placeholders under their ``state_dict`` names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from fx2relax.capture_inputs import Inputs, fake_inputs
from fx2relax.capture_source import GraphSource
from fx2relax.effects import Tokens, drop_tokens
from fx2relax.errors import Fx2RelaxError, ImportFailure
from fx2relax.graph_tidy import number_constants, tidy
from fx2relax.kept import keep_whole, keep_within
from fx2relax.params import InputSpec
from fx2relax.registry import Converter
from fx2relax.shapes import SymbolTable
from fx2relax.whole import whole_operators

__all__ = ["Captured", "Input", "capture", "trace"]


@dataclass
class Input:
    """One placeholder of a captured graph.

    Attributes:
        name: a user input's own name, a weight's name in the ``state_dict``, ``constant_0`` ...
        kind: ``"user"``, ``"parameter"``, ``"buffer"`` or ``"constant"``.
        val: the fake tensor or SymInt that stands for it in the graph.
        value: the real tensor of a weight or constant; None for a user's input.
        mutated: the graph computes a new value for it; see `Captured.mutations`.
    """

    name: str
    kind: str
    val: Any
    value: torch.Tensor | None = None
    mutated: bool = False


@dataclass
class Captured:
    """A functional ATen graph and what its flat inputs and outputs are.

    Attributes:
        gm: the graph; ``meta["val"]`` of every node is its fake value. Its output is a tuple:
            the user's flat tensors and symbolic sizes first, then the mutated inputs' new values.
        inputs: one per placeholder, in order.
        out_spec: the structure (pytree) of what the user's graph returns.
        constants: leaves of that structure that are no tensors or symbolic sizes, by position;
            they are not among the graph's outputs.
        mutations: positions in `inputs` whose new values follow the user's outputs, in order.
        symbols: the sizes, with the caller's `tirx.Var` or new ones named as the caller named
            them.
        shape_env: PyTorch's knowledge of the symbols: their ranges and the guards.
    """

    gm: fx.GraphModule
    inputs: list[Input]
    out_spec: pytree.TreeSpec
    constants: dict[int, Any]
    mutations: list[int]
    symbols: SymbolTable
    shape_env: Any = field(repr=False, default=None)

    @property
    def graph(self) -> fx.Graph:
        """The graph."""
        return self.gm.graph

    def specs(self) -> list[InputSpec]:
        """The inputs as the importer takes them."""
        return [
            InputSpec(i.name, i.kind, i.val, i.value, i.mutated, position=position)
            for position, i in enumerate(self.inputs)
        ]

    @property
    def num_outputs(self) -> int:
        """How many of the graph's flat outputs are the user's; the rest are mutations."""
        return self.out_spec.num_leaves - len(self.constants)

    def unflatten(self, values: Sequence[Any]) -> Any:
        """What the user's graph returns, from the graph's flat outputs."""
        given = iter(values)
        count = self.out_spec.num_leaves
        leaves = [self.constants[i] if i in self.constants else next(given) for i in range(count)]
        return pytree.tree_unflatten(leaves, self.out_spec)


def capture(
    gm: fx.GraphModule | torch.export.ExportedProgram,
    inputs: Sequence[Any] | None = None,
    *,
    names: Sequence[str] | None = None,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    converters: Mapping[Any, Converter] | None = None,
) -> Captured:
    """Turn any FX graph into a functional ATen graph.

    Args:
        gm: from `fx.symbolic_trace`, Dynamo, AOTAutograd or `torch.export` (the program itself,
            or its ``.module()``).
        inputs: one entry per placeholder: a tensor; a ``(shape, dtype)`` pair whose sizes are
            ints, names or `tirx.Var`; a name or `tirx.Var` for an input that is a size; a Python
            number, string or None, which is built in; or a list, tuple or dict of these. One
            name is one size everywhere; two `tirx.Var` are two sizes. Left out, the fake values
            that the placeholders carry are used.
        names: names for the inputs, one per entry; the placeholders' own when left out.
        decompositions: ATen overload -> decomposition, applied while tracing.
        converters: those of functions, methods and modules, whose calls stay whole;
            `fx2relax.registry.kept_whole()` gives the ones in force.

    Raises:
        ImportFailure: the graph does not run on these inputs, or works only for one value of a
            size that was given as symbolic; the message has the user's source line.
        ValueError: an input that is none of the above, or a wrong number of them.
    """
    source = GraphSource(gm)
    source.gm = keep_whole(source.gm, converters or {})
    made = fake_inputs(source.gm, inputs, names, source.given)
    try:
        with keep_within(source.gm, converters or {}):
            return trace(source, made, decompositions or {})
    except Fx2RelaxError:
        raise
    except Exception as error:
        raise ImportFailure(f"the graph could not be captured: {error}") from error


def trace(
    source: Source, inputs: Inputs, decompositions: Mapping[Any, Callable[..., Any]]
) -> Captured:
    """Run a source once under PyTorch's tracing; see `capture`."""
    return _Tracer(source, inputs, dict(decompositions)).run()


class Source(Protocol):
    """What is traced: an FX graph, or a function over a module's weights."""

    def weights(self) -> dict[str, tuple[str, torch.Tensor]]:
        """Name -> (kind, tensor), in the order of the parameters."""

    def fake(self, mode: FakeTensorMode, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for a weight while it is traced."""

    def call(self, inputs: Inputs, args: Sequence[Any], weights: Mapping[str, Any]) -> Any:
        """Run it with other weights than its own."""


class _Tracer:
    """Traces one source."""

    def __init__(
        self, source: Source, inputs: Inputs, decompositions: dict[Any, Callable[..., Any]]
    ) -> None:
        self.source = source
        self.inputs = inputs
        self.decompositions = decompositions
        self.out_spec: pytree.TreeSpec | None = None
        self.constants: dict[int, Any] = {}
        self.mutated: list[int] = []

    def run(self) -> Captured:
        mode = self.inputs.mode
        weights = self.source.weights()
        fakes = [self.source.fake(mode, n, tensor) for n, (_, tensor) in weights.items()]
        self.names = list(weights)
        flat = [*self.inputs.flat, *fakes]
        # Tensors that a forward makes of literals are real even here.
        allowed = mock.patch.object(mode, "allow_non_fake_inputs", True)
        whole = whole_operators()
        with (
            torch.no_grad(),
            enable_python_dispatcher(),
            whole,
            allowed,
            mode,
            preserve_node_meta(),
        ):
            gm = make_fx(
                self._functional,
                decomposition_table=self.decompositions,
                _allow_non_fake_inputs=True,
            )(*flat)
        drop_tokens(gm)
        described = [
            Input(name, "user", val)
            for name, val in zip(self.inputs.names, self.inputs.flat, strict=True)
        ]
        described += [
            Input(name, kind, val, value)
            for (name, (kind, value)), val in zip(weights.items(), fakes, strict=True)
        ]
        for position in self.mutated:
            described[position].mutated = True
        assert self.out_spec is not None
        kept, constants = tidy(gm, described, len(self.mutated))
        described = [described[i] for i in kept]
        described += [Input("", "constant", val, value) for val, value in constants]
        number_constants(gm, described)
        return Captured(
            gm,
            described,
            self.out_spec,
            self.constants,
            [kept.index(i) for i in self.mutated],
            self.inputs.symbols,
            mode.shape_env,
        )

    def _functional(self, *flat: Any) -> list[Any]:
        """The graph as a function of flat values that returns flat values and writes to none."""
        disable = torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
        )
        mode = FunctionalTensorMode()
        mode._tokens = Tokens()
        with disable, mode:
            wrapped = [
                FunctionalTensor.to_functional(v) if isinstance(v, torch.Tensor) else v
                for v in flat
            ]
            results = self._call(wrapped)
            outputs = [_unwrapped(v) for v in results]
            self.mutated = []
            for position, value in enumerate(wrapped):
                if isinstance(value, FunctionalTensor) and _written(value):
                    self.mutated.append(position)
                    outputs.append(_unwrapped(value))
        return outputs

    def _call(self, flat: Sequence[Any]) -> list[Any]:
        count = len(self.inputs.flat)
        args = self.inputs.unflatten(flat[:count])
        weights = dict(zip(self.names, flat[count:], strict=True))
        leaves, self.out_spec = pytree.tree_flatten(self.source.call(self.inputs, args, weights))
        dynamic = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
        self.constants = {i: v for i, v in enumerate(leaves) if not isinstance(v, dynamic)}
        return [v for v in leaves if isinstance(v, dynamic)]


def _written(value: FunctionalTensor) -> bool:
    """Whether the data of a functional input has been written to."""
    return bool(torch._functionalize_has_data_mutation(value.elem))  # type: ignore[attr-defined]


def _unwrapped(value: Any) -> Any:
    if not isinstance(value, FunctionalTensor):
        return value
    torch._sync(value)  # type: ignore[attr-defined, no-untyped-call]
    return torch._from_functional_tensor(value.elem)
