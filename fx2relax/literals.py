"""Python values of a graph as JSON and back: numbers, dtypes, operators, nested sequences.

What has no spelling that means the same in another process is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fx2relax import registry

_PLAIN = (str, bool, int, type(None))
_NAMED = (torch.dtype, torch.layout, torch.memory_format)
Extra = Callable[[Any], Any]


class NoSpelling(ValueError):
    """A value that means nothing in another process."""


def encode(value: Any, extra: Extra | None = None) -> Any:
    """A value as JSON's lists, dicts, strings and numbers.

    Args:
        value: numbers, strings, None, PyTorch's dtypes, layouts, memory formats, devices and
            operator overloads; ``...``; tuples, lists, slices and dicts of them.
        extra: spells what is none of these, as a dict of one key; returns None for what it does
            not know.

    Raises:
        NoSpelling: anything else.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, str):  # TVM has a class of its own for them
        return str(value)
    if type(value) is float:
        return {"float": value.hex()}
    if type(value) is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, _NAMED):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch._ops.OpOverload):
        return {"op": operator_name(value)}
    if value is ...:
        return {"ellipsis": None}
    if isinstance(value, slice):
        return {"slice": [encode(v, extra) for v in (value.start, value.stop, value.step)]}
    if isinstance(value, list):  # FX has a class of its own for them
        return [encode(v, extra) for v in value]
    if type(value) in (tuple, torch.Size) or type(value).__name__ == "immutable_tuple":
        return {"tuple": [encode(v, extra) for v in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(k, extra), encode(v, extra)] for k, v in value.items()]}
    spelled = extra(value) if extra is not None else None
    if spelled is None:
        raise NoSpelling(f"a value of type {type(value).__name__}")
    return spelled


def decode(text: Any, extra: Callable[[str, Any], Any] | None = None) -> Any:
    """The value that `encode` spelled; `extra` makes what its own `extra` spelled, by the key.

    Raises:
        ValueError: what `encode` does not spell so.
        AttributeError: a name that this PyTorch does not have.
    """
    if isinstance(text, _PLAIN):
        return text
    if isinstance(text, list):
        return [decode(v, extra) for v in text]
    if not isinstance(text, dict) or len(text) != 1:
        raise ValueError(f"no value is spelled {text!r}")
    ((kind, given),) = text.items()
    if kind == "float":
        return float.fromhex(given)
    if kind == "complex":
        return complex(float.fromhex(given[0]), float.fromhex(given[1]))
    if kind == "torch":
        found = getattr(torch, given)
        if not isinstance(found, _NAMED):
            raise ValueError(f"torch.{given} is no dtype, layout or memory format")
        return found
    if kind == "device":
        return torch.device(given)
    if kind == "op":
        return operator_of(given)
    if kind == "ellipsis":
        return ...
    if kind == "slice":
        return slice(*(decode(v, extra) for v in given))
    if kind == "tuple":
        return tuple(decode(v, extra) for v in given)
    if kind == "dict":
        return {decode(k, extra): decode(v, extra) for k, v in given}
    if extra is None:
        raise ValueError(f"no value is spelled {text!r}")
    return extra(kind, given)


def operator_name(target: torch._ops.OpOverload) -> str:
    """``aten.add.Tensor``."""
    namespace, name = target._schema.name.split("::")
    return f"{namespace}.{name}.{target._overloadname}"


def operator_of(name: str) -> torch._ops.OpOverload:
    """The overload of that name. Raises AttributeError where there is none."""
    try:
        return _operator(name)
    except AttributeError:
        if not name.startswith("fx2relax."):
            raise
        registry.load()  # some converters come with an operator of their own
        return _operator(name)


def _operator(name: str) -> torch._ops.OpOverload:
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    if not isinstance(found, torch._ops.OpOverload):
        raise AttributeError(f"torch.ops.{name} is no operator")
    return found
