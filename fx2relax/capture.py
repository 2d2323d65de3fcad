"""Any FX graph as a functional ATen graph with fake values on its nodes.

The graph is run once under PyTorch's own tracing: fake tensors learn shapes and dtypes,
functionalisation turns writes into values, the caller's decompositions are applied, and calls kept
whole stay whole. Weights become placeholders under their ``state_dict`` names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.export.graph_signature import InputKind
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.fx.traceback import preserve_node_meta

from fx2relax.capture_inputs import Inputs, fake_inputs
from fx2relax.effects import Tokens, drop_tokens
from fx2relax.errors import Fx2RelaxError, ImportFailure, source_line
from fx2relax.graph_tidy import copy_graph, number_constants, tidy
from fx2relax.kept import keep_whole, keep_within
from fx2relax.module_view import functional_call
from fx2relax.params import InputSpec
from fx2relax.registry import Converter
from fx2relax.shapes import SymbolTable
from fx2relax.whole import whole_operators

__all__ = ["Captured", "Input", "capture"]

# What fx.symbolic_trace and torch.export call the tensors that a forward writes as literals.
_LITERAL = re.compile(r"(^|\.)(_tensor_constant|lifted_tensor_|_lifted_tensor_constant)\d+$")


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
    source = _Source(gm)
    source.gm = keep_whole(source.gm, converters or {})
    made = fake_inputs(source.gm, inputs, names, source.given)
    try:
        with keep_within(source.gm, converters or {}):
            return _Tracer(source, made, dict(decompositions or {})).run()
    except Fx2RelaxError:
        raise
    except Exception as error:
        raise ImportFailure(f"the graph could not be captured: {error}") from error


class _Source:
    """A graph with its weights on itself, whatever it came as.

    Attributes:
        gm: the graph module.
        constants: names of the tensors that are neither parameters nor buffers.
        given: the program's own inputs, by name, with the fake values it was exported with.
    """

    def __init__(self, program: fx.GraphModule | torch.export.ExportedProgram) -> None:
        self.constants: set[str] = set()
        self.given: dict[str, Any] | None = None
        if isinstance(program, torch.export.ExportedProgram):
            signature = program.graph_signature
            self.constants = set(signature.inputs_to_lifted_tensor_constants.values())
            users = [s.arg.name for s in signature.input_specs if s.kind is InputKind.USER_INPUT]
            values = {n.name: n.meta.get("val") for n in program.graph.nodes}
            self.given = {name: values[name] for name in users}
            # Its guards only repeat what the inputs' symbols say.
            self.gm = _unlifted(program)
        else:
            self.gm = program
        if any(n.op == "call_module" and n.target == "_guards_fn" for n in self.gm.graph.nodes):
            self.gm = _without_guards(self.gm)

    def weights(self) -> dict[str, tuple[str, torch.Tensor]]:
        """Name -> (kind, tensor): in ``state_dict`` order, constants last; a tied weight once."""
        gm = self.gm
        parameters = dict(gm.named_parameters(remove_duplicate=False))
        buffers = dict(gm.named_buffers(remove_duplicate=False))
        every: dict[str, torch.Tensor] = {**parameters, **buffers}
        order = [*gm.state_dict(keep_vars=True), *every]
        found: dict[str, tuple[str, torch.Tensor]] = {}
        seen: set[int] = set()
        for name in dict.fromkeys(order):
            tensor = every.get(name)
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            kind = "parameter" if name in parameters else "buffer"
            if name in self.constants or _LITERAL.search(name):
                kind = "constant"
            found[name] = (kind, tensor)
        return dict(sorted(found.items(), key=lambda item: item[1][0] == "constant"))


def _unlifted(program: torch.export.ExportedProgram) -> fx.GraphModule:
    try:
        module = program.module(check_guards=False)
    except TypeError:  # before torch 2.10
        module = program.module()
    assert isinstance(module, fx.GraphModule)
    return module


def _without_guards(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph less the input checks that ``.module()`` of an exported program has."""
    graph = copy_graph(gm.graph)
    for node in list(graph.nodes):
        if node.op == "call_module" and node.target == "_guards_fn":
            graph.erase_node(node)
    return fx.GraphModule(gm, graph)


class _Named(fx.Interpreter):
    """Runs a graph under tracing; new nodes take the old ones' names, and sizes stay symbolic."""

    def __init__(self, gm: fx.GraphModule, inputs: Inputs) -> None:
        super().__init__(gm)
        self.inputs = inputs
        self.extra_traceback = False

    def run_node(self, n: fx.Node) -> Any:
        mode: Any = get_proxy_mode()
        graph = mode.tracer.graph
        before = set(graph.nodes)
        try:
            result = super().run_node(n)
        except Fx2RelaxError:
            raise
        except Exception as error:
            where = source_line(n) or n.format_node()
            text = self.inputs.with_names(str(error))
            raise ImportFailure(f"{where}: {type(error).__name__}: {text}") from error
        self._refuse_specialised(n)
        if n.op in ("call_function", "call_method", "call_module"):
            made = _node_of(result, mode.tracer)
            if made is not None and made not in before:
                made._rename(n.name)
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.view.default:
            return _view(*args, **kwargs)
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target == "view":
            return _view(*args, **kwargs)
        return super().call_method(target, args, kwargs)

    def _refuse_specialised(self, node: fx.Node) -> None:
        fault = self.inputs.specialised()
        if fault:
            where = source_line(node) or node.format_node()
            raise ImportFailure(
                f"{where}: {fault}\nGive that size as an int, or change the model so that it "
                "works for every size."
            )


class _Tracer:
    """Traces one graph; see `capture`."""

    def __init__(
        self, source: _Source, inputs: Inputs, decompositions: dict[Any, Callable[..., Any]]
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
        fakes = [fake_weight(mode, tensor) for _, tensor in weights.values()]
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
        runner = _Runner(self.source.gm, self.inputs)
        state = {f"gm.{name}": value for name, value in weights.items()}
        leaves, self.out_spec = pytree.tree_flatten(functional_call(runner, state, args, {}))
        dynamic = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
        self.constants = {i: v for i, v in enumerate(leaves) if not isinstance(v, dynamic)}
        return [v for v in leaves if isinstance(v, dynamic)]


class _Runner(torch.nn.Module):
    """The graph as a module whose weights can be swapped."""

    def __init__(self, gm: fx.GraphModule, inputs: Inputs) -> None:
        super().__init__()
        self.gm = gm
        self.inputs = inputs

    def forward(self, *args: Any) -> Any:
        # The graphs of torch.export take their arguments in a structure of their own.
        return _Named(self.gm, self.inputs).run(*args)


def _view(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`torch.Tensor.view`, where a decomposition may have given other strides than eager's."""
    try:
        return tensor.view(*args, **kwargs)
    except (ValueError, RuntimeError):
        shape = args or (kwargs.get("size"),)
        if shape[0] is None or isinstance(shape[0], torch.dtype):
            raise
        return tensor.reshape(*shape)


def _node_of(value: Any, tracer: Any) -> fx.Node | None:
    """The node that computes a traced tensor; None where there is none to name."""
    if not isinstance(value, FunctionalTensor):
        return None
    proxy: Any = get_proxy_slot(torch._from_functional_tensor(value.elem), tracer, None)
    node = getattr(getattr(proxy, "proxy", None), "node", None)
    return node if isinstance(node, fx.Node) and node.op == "call_function" else None


def fake_weight(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor with a weight's own sizes."""
    fake: torch.Tensor = mode.from_tensor(tensor.detach(), static_shapes=True)
    return fake


def _written(value: FunctionalTensor) -> bool:
    """Whether the data of a functional input has been written to."""
    return bool(torch._functionalize_has_data_mutation(value.elem))  # type: ignore[attr-defined]


def _unwrapped(value: Any) -> Any:
    if not isinstance(value, FunctionalTensor):
        return value
    torch._sync(value)  # type: ignore[attr-defined, no-untyped-call]
    return torch._from_functional_tensor(value.elem)
