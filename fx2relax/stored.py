"""What the runtime has to know of a program, as JSON: all of `Imported` but the module."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.fx

from fx2relax.imported import Imported
from fx2relax.literals import NoSpelling, decode, encode, operator_of
from fx2relax.outputs import OutputSpec
from fx2relax.params import InputSpec
from fx2relax.shapes import SymbolTable
from fx2relax.torch_calls import TorchCall
from fx2relax.view_replay import Number, Replay

Node = torch.fx.Node
_SPEC = ("relax_name", "at_start", "storage", "permutation", "kind", "mutated", "written")


def record(imported: Imported, graph: torch.fx.GraphModule, specs: Sequence[InputSpec]) -> Any:
    """Spell a program for `restore`.

    Args:
        imported: what the importer made of the graph.
        graph: the graph that was imported.
        specs: the inputs that were given to the importer.

    Raises:
        NoSpelling: it holds what has no meaning in another process.
    """
    given = {id(spec): place for place, spec in enumerate(specs)}
    held = {id(attrgetter(name)(graph)): name for name in reversed(_attributes(graph))}
    params = []
    for spec in imported.params:
        source = given.get(id(spec))
        fields = {name: encode(getattr(spec, name)) for name in _SPEC}
        attribute = held.get(id(spec.value)) if source is None else None
        if source is None and attribute is None:
            raise NoSpelling(f"the constant {spec.name}")
        params.append({"input": source, "attribute": attribute, "name": spec.name, **fields})
    return {
        "name": imported.name,
        "params": params,
        "num_input": imported.num_input,
        "outputs": [_output(spec) for spec in imported.outputs],
        "same": [_first(imported.outputs, spec) for spec in imported.outputs],
        "solved": [str(symbol) for symbol in imported.solved],
        "nodes": imported.nodes,
        "converted": imported.converted,
        "torch_calls": [_call(call) for call in imported.torch_calls.values()],
    }


def restore(said: Any, graph: torch.fx.GraphModule, specs: Sequence[InputSpec]) -> Imported:
    """The program that `record` spelled, for an equal graph and equal inputs.

    Raises:
        ValueError, KeyError, AttributeError, ...: it was not spelled by `record` of this version.
    """
    params = []
    for fields in said["params"]:
        place = fields["input"]
        if place is None:
            value = attrgetter(fields["attribute"])(graph)
            spec = InputSpec(fields["name"], "constant", value, value=value, position=-1)
        else:
            spec = specs[place]
        for name in _SPEC:
            setattr(spec, name, decode(fields[name]))
        params.append(spec)
    outputs = [_read_output(output) for output in said["outputs"]]
    symbols = {
        str(symbol): symbol
        for spec in params
        for size in (spec.val.shape if isinstance(spec.val, torch.Tensor) else [spec.val])
        if isinstance(size, torch.SymInt)
        for symbol in size.node.expr.free_symbols
    }
    calls = [_read_call(call) for call in said["torch_calls"]]
    return Imported(
        mod=None,
        name=said["name"],
        params=params,
        num_input=said["num_input"],
        # An output that is returned twice is one object.
        outputs=[outputs[first] for first in said["same"]],
        torch_calls={call.name: call for call in calls},
        symbols=SymbolTable(),
        solved=[symbols[name] for name in said["solved"]],
        nodes=said["nodes"],
        converted=said["converted"],
    )


def _first(specs: Sequence[OutputSpec], wanted: OutputSpec) -> int:
    return next(place for place, spec in enumerate(specs) if spec is wanted)


def _attributes(graph: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "get_attr"]


def _output(spec: OutputSpec) -> dict[str, Any]:
    return {
        field.name: encode(getattr(spec, field.name), _replay)
        for field in dataclasses.fields(OutputSpec)
    }


def _replay(value: Any) -> Any:
    if isinstance(value, Replay):
        return {"replay": encode(value.steps, _replay)}
    return {"number": value.index} if isinstance(value, Number) else None


def _read_output(said: dict[str, Any]) -> OutputSpec:
    return OutputSpec(**{name: decode(value, _read_replay) for name, value in said.items()})


def _read_replay(kind: str, given: Any) -> Any:
    if kind == "replay":
        return Replay(decode(given, _read_replay))
    if kind == "number":
        return Number(given)
    raise ValueError(f"no value is spelled {kind}")


def _call(call: TorchCall) -> dict[str, Any]:
    if not isinstance(call.target, torch._ops.OpOverload):
        raise NoSpelling(f"a call of {call.op_name} in PyTorch")
    args, kwargs = call.example()
    operand = lambda value: {"operand": 0} if isinstance(value, Node) else None  # noqa: E731
    return {
        **{k: encode(v) for k, v in call.state().items()},
        "target": encode(call.target)["op"],
        "arguments": encode([args, kwargs], operand),
    }


def _read_call(said: dict[str, Any]) -> TorchCall:
    graph = torch.fx.Graph()

    def operand(kind: str, _: Any) -> Node:
        if kind != "operand":
            raise ValueError(f"no value is spelled {kind}")
        return graph.placeholder("operand")

    args, kwargs = decode(said["arguments"], operand)
    node = graph.call_function(operator_of(said["target"]), tuple(args), kwargs)
    state = {k: decode(v) for k, v in said.items() if k not in ("target", "arguments")}
    return TorchCall.restore(node, state)
