"""The names that a model gives its weights, read from Dynamo's graph."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PART = re.compile(r"\._(modules|parameters|buffers)\[['\"]([^'\"]+)['\"]\]|\.(\w+)|\[(\d+)\]")


def weight_names(graph_module: torch.fx.GraphModule) -> list[tuple[str, str] | None]:
    """For each input of the ATen graph its ``state_dict`` name and kind; None for a user's input.

    Those are Dynamo's placeholders, but that AOTAutograd takes a tensor of a subclass apart: a
    quantised weight is integers and scales, whose names begin with that of the weight. A tensor
    is a weight if Dynamo marked its address as static: parameters and buffers of the modules that
    the compiled function reaches. FSDP gathers a weight for each call, in memory that it then gives
    back, without another version: it has a name, and is an input as a user's is.
    """
    placeholders = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
    return [name for node in placeholders for name in _names(node)]


def _names(node: torch.fx.Node) -> list[tuple[str, str] | None]:
    whole = _name(node)
    parts = _parts(node.meta.get("example_value"))
    return [None if whole is None else (whole[0] + part, whole[1]) for part in parts]


def _parts(value: Any) -> list[str]:
    """What follows a tensor's name in those of the tensors that it is made of."""
    if not is_traceable_wrapper_subclass(value):
        return [""]
    return [
        f".{name}{part}"
        for name in value.__tensor_flatten__()[0]
        for part in _parts(getattr(value, name))
    ]


def _name(node: torch.fx.Node) -> tuple[str, str] | None:
    argument = node.meta.get("grapharg")
    source = getattr(argument, "source", None)
    if source is None:
        return None
    text = _source_text(source)
    example = node.meta.get("example_value")
    static = getattr(node, "_dynamo_static_input_type", None) or getattr(
        example, "_dynamo_static_input_type", None
    )
    is_parameter = isinstance(example, torch.nn.Parameter)
    if not is_parameter and "._buffers[" not in text and static is None:
        return None
    parts = [m.group(2) or m.group(3) or m.group(4) for m in _PART.finditer(text)]
    name = ".".join(p for p in parts if p) or str(node.target)
    if _value(source.guard_source).is_fsdp_module():
        return name, "user"
    return name, "parameter" if is_parameter else "buffer"


def _source_text(source: Any) -> str:
    return str(_value(source.name))


def _value(given: Any) -> Any:
    """What Dynamo's sources have as attributes, and once had as methods."""
    return given() if callable(given) else given
