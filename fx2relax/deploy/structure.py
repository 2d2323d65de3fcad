"""What a function takes and returns in Python's terms: tuples, lists and dicts around tensors.

A structure is a tree of the nodes below. It is spelled as JSON, in a manifest, like this::

    {"tuple": [{"at": 0}, {"dict": [["mask", {"at": 1}], ["scale", {"constant": 0.5}]]}]}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from fx2relax.errors import ArgumentError

from .sizes import parse

Number: TypeAlias = "bool | int | float | str | None"


@dataclass(frozen=True)
class At:
    """A parameter (in what a function takes) or a result (in what it returns), by its index."""

    index: int


@dataclass(frozen=True)
class Argument:
    """In what a function returns: the caller's own argument, by the parameter's index."""

    index: int


@dataclass(frozen=True)
class SizeOf:
    """In what a function returns: a number, as text over named sizes."""

    text: str


@dataclass(frozen=True)
class Constant:
    """A number, a string or None that the function was exported for."""

    value: Number


@dataclass(frozen=True)
class Several:
    """A tuple or a list; `kind` is "tuple" or "list"."""

    kind: str
    items: tuple[Node, ...]


@dataclass(frozen=True)
class Keyed:
    """A dict; its keys are strings or ints."""

    items: tuple[tuple[str | int, Node], ...]


Node: TypeAlias = At | Argument | SizeOf | Constant | Several | Keyed


def of(value: Any, leaf: Callable[[Any], Node | None]) -> Node:
    """The structure of a value made of tuples, lists, dicts, constants and leaves.

    Args:
        value: the value.
        leaf: the node of a value that is one; None for all others.

    Raises:
        TypeError: a value, or a key of a dict, that no structure holds.
    """
    node = leaf(value)
    if node is not None:
        return node
    if isinstance(value, (tuple, list)):
        kind = "list" if isinstance(value, list) else "tuple"
        return Several(kind, tuple(of(item, leaf) for item in value))
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, (str, int)):
                raise TypeError(f"the key {key!r} of a dict is neither a string nor an int")
        return Keyed(tuple((key, of(item, leaf)) for key, item in value.items()))
    if value is None or isinstance(value, (bool, int, float, str)):
        return Constant(value)
    raise TypeError(f"{type(value).__name__} can be neither an argument nor a result")


def leaves(node: Node) -> Iterator[Node]:
    """The nodes of a structure that hold no others, in order."""
    if isinstance(node, Several):
        for item in node.items:
            yield from leaves(item)
    elif isinstance(node, Keyed):
        for _, item in node.items:
            yield from leaves(item)
    else:
        yield node


def take_apart(node: Node, value: Any, name: str, put: Callable[[int, str, Any], None]) -> None:
    """Hand each part of an argument that is a parameter to `put(index, name, part)`.

    Raises:
        ArgumentError: the argument is made up differently; names the part.
    """
    if isinstance(node, At):
        put(node.index, name, value)
    elif isinstance(node, Several):
        if not isinstance(value, (tuple, list)) or len(value) != len(node.items):
            raise ArgumentError(
                f"argument {name!r}: expected a {node.kind} of {len(node.items)},"
                f" got {_kind(value)}"
            )
        for index, (item, part) in enumerate(zip(node.items, value, strict=True)):
            take_apart(item, part, f"{name}[{index}]", put)
    elif isinstance(node, Keyed):
        keys = [key for key, _ in node.items]
        if not isinstance(value, dict) or value.keys() != set(keys):
            raise ArgumentError(
                f"argument {name!r}: expected a dict with the keys {keys}, got {_kind(value)}"
            )
        for key, item in node.items:
            take_apart(item, value[key], f"{name}[{key!r}]", put)
    elif isinstance(node, Constant) and not _same(node.value, value):
        raise ArgumentError(
            f"argument {name!r}: the function was exported for {node.value!r}, got {_kind(value)}"
        )


def put_together(node: Node, leaf: Callable[[Any], Any]) -> Any:
    """A value of this structure; `leaf` makes what is not made of other nodes nor constant."""
    if isinstance(node, Several):
        items = [put_together(item, leaf) for item in node.items]
        return items if node.kind == "list" else tuple(items)
    if isinstance(node, Keyed):
        return {key: put_together(item, leaf) for key, item in node.items}
    return node.value if isinstance(node, Constant) else leaf(node)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    return type(a) is type(b) and bool(a == b)


def _kind(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, dict):
        return f"a dict with the keys {list(value)}"
    shown = value is None or isinstance(value, (bool, int, float, str))
    return repr(value)[:80] if shown else f"a value of type {type(value).__name__}"


def to_json(node: Node) -> Any:
    """A structure as JSON spells it."""
    if isinstance(node, At):
        return {"at": node.index}
    if isinstance(node, Argument):
        return {"argument": node.index}
    if isinstance(node, SizeOf):
        return {"size": node.text}
    if isinstance(node, Several):
        return {node.kind: [to_json(item) for item in node.items]}
    if isinstance(node, Keyed):
        return {"dict": [[key, to_json(item)] for key, item in node.items]}
    value = node.value
    if isinstance(value, float) and not math.isfinite(value):
        return {"constant": {"float": str(value)}}
    return {"constant": value}


def from_json(value: Any) -> Node:
    """What `to_json` spelled.

    Raises:
        ValueError: it is spelled wrong, with the reason.
    """
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError(f"{_kind(value)} is not a structure")
    ((kind, inner),) = value.items()
    if kind in ("at", "argument") and type(inner) is int and inner >= 0:
        return At(inner) if kind == "at" else Argument(inner)
    if kind == "size" and isinstance(inner, str):
        parse(inner)
        return SizeOf(inner)
    if kind == "constant":
        return Constant(_constant(inner))
    if kind in ("tuple", "list") and isinstance(inner, list):
        return Several(kind, tuple(from_json(item) for item in inner))
    if kind == "dict" and isinstance(inner, list):
        return Keyed(tuple(_item(pair) for pair in inner))
    raise ValueError(f"{str(value)[:80]} is not a structure")


def _item(pair: Any) -> tuple[str | int, Node]:
    if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in (str, int):
        raise ValueError(f"{str(pair)[:80]} is not an item of a dict")
    return pair[0], from_json(pair[1])


def _constant(value: Any) -> Number:
    if isinstance(value, dict) and value.keys() == {"float"}:
        if value["float"] in ("nan", "inf", "-inf"):
            return float(value["float"])
    elif value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"{str(value)[:80]} is not a constant")
