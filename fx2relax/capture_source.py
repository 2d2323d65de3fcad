"""FX graphs as something that can be traced: their weights, and how they run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.export.graph_signature import InputKind
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fx2relax.capture_inputs import Inputs
from fx2relax.errors import Fx2RelaxError, ImportFailure, source_line
from fx2relax.graph_tidy import copy_graph
from fx2relax.module_view import functional_call

# What fx.symbolic_trace and torch.export call the tensors that a forward writes as literals.
_LITERAL = re.compile(r"(^|\.)(_tensor_constant|lifted_tensor_|_lifted_tensor_constant)\d+$")


class GraphSource:
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
        found = named_weights(self.gm)
        for name, (_, tensor) in found.items():
            if name in self.constants or _LITERAL.search(name):
                found[name] = ("constant", tensor)
        return dict(sorted(found.items(), key=lambda item: item[1][0] == "constant"))

    def fake(self, mode: FakeTensorMode, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor with a weight's own sizes."""
        return fake_weight(mode, tensor)

    def call(self, inputs: Inputs, args: Sequence[Any], weights: Mapping[str, Any]) -> Any:
        """Run the graph with other weights."""
        state = {f"gm.{name}": value for name, value in weights.items()}
        return functional_call(_Runner(self.gm, inputs), state, args, {})


def named_weights(module: torch.nn.Module) -> dict[str, tuple[str, torch.Tensor]]:
    """Name -> (``"parameter"`` or ``"buffer"``, tensor), as in the ``state_dict``.

    Raises:
        ImportFailure: a weight is made of several tensors.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    every: dict[str, torch.Tensor] = {**parameters, **buffers}
    order = [*module.state_dict(keep_vars=True), *every]
    found: dict[str, tuple[str, torch.Tensor]] = {}
    seen: set[int] = set()
    for name in dict.fromkeys(order):
        tensor = every.get(name)
        if tensor is None or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if is_traceable_wrapper_subclass(tensor):
            raise ImportFailure(
                f"the weight {name} is a {type(tensor).__name__}, which is made of several "
                "tensors: take the model's weights apart first, "
                "torchao.utils.unwrap_tensor_subclass(model)"
            )
        found[name] = ("parameter" if name in parameters else "buffer", tensor)
    return found


def fake_weight(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor with a weight's own sizes."""
    fake: torch.Tensor = mode.from_tensor(tensor.detach(), static_shapes=True)
    return fake


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
