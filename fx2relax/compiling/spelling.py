"""A graph on its way to another process, where it is imported and compiled.

`graph_key` spells all that is compiled depends on; this reads it again. Whether it was read right,
the key of what was read tells. Graphs with symbolic sizes, and those that hold other graphs, are
not taken.
"""

from __future__ import annotations

import base64
import importlib
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.fx
from torch._subclasses import FakeTensor, FakeTensorMode

from fx2relax.graph_key import Spelled, spelled_input
from fx2relax.literals import NoSpelling, decode, operator_of
from fx2relax.params import InputSpec

Node = torch.fx.Node
#: Elements of a constant; larger ones are no part of a key.
LARGEST = 1 << 16


def spell(graph: torch.fx.GraphModule, specs: Sequence[InputSpec]) -> dict[str, Any]:
    """A graph and its inputs as what JSON has.

    Raises:
        NoSpelling: it means nothing in another process, or is not taken.
    """
    spelled = Spelled(graph)
    nodes = spelled.nodes()
    if spelled.symbols or spelled.envs:
        raise NoSpelling("a symbolic size")
    if any(spec.value is not None for spec in specs):
        raise NoSpelling("an input with a value")
    constants = {
        str(node.target): _constant(attrgetter(str(node.target))(graph))
        for node in graph.graph.nodes
        if node.op == "get_attr"
    }
    return {
        "nodes": nodes,
        "names": [node.name for node in graph.graph.nodes],
        "targets": [str(n.target) if n.op == "get_attr" else None for n in graph.graph.nodes],
        "inputs": [spelled_input(spec) for spec in specs],
        "constants": constants,
    }


def read(said: dict[str, Any]) -> tuple[torch.fx.GraphModule, list[InputSpec]]:
    """The graph and the inputs that `spell` spelled.

    Raises:
        ValueError, KeyError, AttributeError, ...: it was not spelled by `spell` of this version.
    """
    root = torch.nn.Module()
    for path, constant in said["constants"].items():
        _hold(root, path, _read_constant(constant))
    values = _Values()
    graph = torch.fx.Graph()
    made: list[Node] = []

    def extra(kind: str, given: Any) -> Any:
        if kind != "node":
            raise ValueError(f"no value is spelled {kind}")
        return made[given]

    for (op, spelled, arguments, val), name, path in zip(
        said["nodes"], said["names"], said["targets"], strict=True
    ):
        args, kwargs = decode(arguments, extra)
        target = path or ("output" if op == "output" else spelled)
        if op == "call_function":
            target = _target(spelled)
        node = graph.create_node(op, target, tuple(args), kwargs, name=name)
        node.meta["val"] = values.read(val, target)
        made.append(node)
    module = torch.fx.GraphModule(root, graph)
    placeholders = [node for node in made if node.op == "placeholder"]
    specs = []
    for fields, node in zip(said["inputs"], placeholders, strict=True):
        name, kind, mutated, permutation, position, storage, written = fields
        order = None if permutation is None else tuple(permutation)
        spec = InputSpec(name, kind, node.meta["val"], None, mutated, order, position)
        spec.storage, spec.written = storage, written
        specs.append(spec)
    return module, specs


class _Values:
    """Reads fake values, of which some share memory."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self.storages: dict[int, torch.Tensor] = {}

    def read(self, said: Any, target: Any) -> Any:
        if not isinstance(said, list):
            return decode(said)
        if not said or not isinstance(said[0], str):
            values = [self.read(each, target) for each in said]
            return values if _gives_a_list(target) else tuple(values)
        return self._tensor(*said)

    def _tensor(
        self,
        _: str,
        dtype: str,
        layout: str,
        device: str,
        shape: list[int],
        conj: bool,
        neg: bool,
        requires_grad: bool,
        quantized: bool,
        stride: list[int],
        offset: int,
        place: int,
        size: int,
    ) -> torch.Tensor:
        if layout != "torch.strided" or conj or neg or quantized:
            raise ValueError("no plain tensor")
        kind: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
        whole = self.storages.get(place)
        if whole is None:
            whole = torch.empty(size, dtype=torch.uint8, device="meta")
            self.storages[place] = whole
        # One by one under the mode, tensors would take ten times as long.
        found = torch.empty(0, dtype=kind, device="meta")
        found.set_(whole.untyped_storage(), offset, shape, stride)
        if requires_grad:
            found.requires_grad_()
        return FakeTensor(self.mode, found, torch.device(device))


def _gives_a_list(target: Any) -> bool:
    """Whether an operator returns one list of tensors, and not several tensors."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    returns = target._schema.returns
    return len(returns) == 1 and isinstance(returns[0].type, torch._C.ListType)


def _target(name: str) -> Any:
    module, _, function = name.rpartition(".")
    if module in ("_operator", "operator", "builtins", "math"):
        return getattr(importlib.import_module(module), function)
    return operator_of(name)


def _constant(value: Any) -> dict[str, Any]:
    plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
    if not plain or value.numel() > LARGEST or value.device.type != "cpu":
        raise NoSpelling("an attribute that is no small tensor")
    dense = value.detach().resolve_conj().resolve_neg().contiguous()
    content = bytes(dense.reshape(-1).view(torch.uint8).numpy())
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "stride": list(value.stride()),
        "content": base64.b64encode(content).decode(),
    }


def _read_constant(said: dict[str, Any]) -> torch.Tensor:
    dtype, shape = getattr(torch, said["dtype"]), said["shape"]
    content = bytearray(base64.b64decode(said["content"]))
    flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    value = torch.empty_strided(shape, said["stride"], dtype=dtype)
    return value.copy_(flat.reshape(shape))


def _hold(root: torch.nn.Module, path: str, value: torch.Tensor) -> None:
    *parts, last = path.split(".")
    for part in parts:
        if not hasattr(root, part):
            root.add_module(part, torch.nn.Module())
        root = getattr(root, part)
    root.register_buffer(last, value)
