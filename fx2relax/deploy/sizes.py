"""Sizes: ints, or text such as ``2 * n + 1`` over named sizes, and how the names are found.

Text is parsed and evaluated here, node by node: nothing that a file holds is run as code.
"""

from __future__ import annotations

import ast
import functools
import keyword
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: A size in a shape: a number, or an expression over named sizes.
SizeText = int | str

_LONGEST = 4096
_TWO: dict[Any, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS = {"min": min, "max": max}


def is_name(text: str) -> bool:
    """Whether a size can be called so."""
    return text.isidentifier() and not keyword.iskeyword(text) and text not in _FUNCTIONS


class Unsolved(ValueError):
    """Sizes that contradict each other or that nothing tells."""


@dataclass(frozen=True)
class Expression:
    """One size.

    Attributes:
        text: as it was written.
        names: the named sizes in it.
    """

    text: str
    names: frozenset[str]
    tree: Any = field(repr=False, compare=False)

    @property
    def is_name(self) -> bool:
        """Whether it is one named size and nothing else."""
        return isinstance(self.tree, ast.Name)

    def value(self, sizes: Mapping[str, int]) -> int:
        """Its value.

        Raises:
            ZeroDivisionError: it divides by a size that is 0.
        """
        return _value(self.tree, sizes)

    def solve(self, name: str, sizes: Mapping[str, int], wanted: int) -> int | None:
        """The one value of a name for which this is `wanted`; None where there is no such one.

        Args:
            name: occurs in it.
            sizes: the values of all its other names.
            wanted: the value.
        """
        line = _line(self.tree, name, sizes)
        if line is None or line[0] == 0:
            return None
        found, rest = divmod(wanted - line[1], line[0])
        return None if rest else found


@functools.cache
def parse(size: SizeText) -> Expression:
    """A size as an expression.

    Raises:
        ValueError: not a size, with the reason.
    """
    text = str(size)
    if len(text) > _LONGEST:
        raise ValueError(f"a size of {len(text)} characters")
    try:
        tree = ast.parse(text, mode="eval").body
        names = frozenset(_names(tree))
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{text[:80]!r} is not a size") from None
    return Expression(text, names, tree)


def _names(node: Any) -> Iterable[str]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return
    if isinstance(node, ast.Name) and is_name(node.id):
        yield node.id
    elif isinstance(node, ast.BinOp) and type(node.op) in _TWO:
        yield from _names(node.left)
        yield from _names(node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield from _names(node.operand)
    elif _is_call(node):
        for argument in node.args:
            yield from _names(argument)
    else:
        raise ValueError(f"{ast.unparse(node)[:80]!r} cannot be part of a size")


def _is_call(node: Any) -> bool:
    known = isinstance(node, ast.Call) and getattr(node.func, "id", None) in _FUNCTIONS
    return known and not node.keywords and len(node.args) > 1


def _value(node: Any, sizes: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant):
        return int(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.Name):
        return sizes[node.id]
    if isinstance(node, ast.BinOp):
        return _TWO[type(node.op)](_value(node.left, sizes), _value(node.right, sizes))
    if isinstance(node, ast.UnaryOp):
        return -_value(node.operand, sizes)
    return int(_FUNCTIONS[node.func.id](*(_value(a, sizes) for a in node.args)))


def _line(node: Any, name: str, sizes: Mapping[str, int]) -> tuple[int, int] | None:
    """Slope and rest of an expression that is linear in a name; None where it is not."""
    if isinstance(node, ast.Constant):
        return 0, int(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.Name):
        return (1, 0) if node.id == name else (0, sizes[node.id])
    if isinstance(node, ast.UnaryOp):
        inner = _line(node.operand, name, sizes)
        return None if inner is None else (-inner[0], -inner[1])
    parts = node.args if isinstance(node, ast.Call) else [node.left, node.right]
    lines = [_line(part, name, sizes) for part in parts]
    known = [line for line in lines if line is not None]
    if len(known) < len(lines):
        return None
    if not any(slope for slope, _ in known):
        return 0, _value(node, {**sizes, name: 0})
    if isinstance(node, ast.Call):
        return None
    (a, b), (c, d) = known
    if isinstance(node.op, ast.Add):
        return a + c, b + d
    if isinstance(node.op, ast.Sub):
        return a - c, b - d
    if isinstance(node.op, ast.Mult) and a * c == 0:
        return a * d + b * c, b * d
    return None


@dataclass(frozen=True)
class Shown:
    """A size that a tensor or a number has: what it must be, what it is, and where."""

    wanted: Expression
    given: int
    where: str


def solve(shown: Iterable[Shown], known: Mapping[str, int]) -> dict[str, int]:
    """The named sizes, and a check of every size that is shown.

    Args:
        shown: what the arguments show.
        known: sizes that are fixed already (the weights').

    Raises:
        Unsolved: two places disagree, or a size is not what it has to be; names the places.
    """
    sizes, told = dict(known), dict.fromkeys(known, "the weights")
    left = list(shown)
    for item in left:
        name = item.wanted.text
        if item.wanted.is_name and name not in sizes:
            sizes[name], told[name] = item.given, item.where
    waiting = left
    while waiting:
        again = [item for item in waiting if not _try(item, sizes, told)]
        if len(again) == len(waiting):
            break
        waiting = again
    for item in left:
        _check(item, sizes, told)
    return sizes


def _try(item: Shown, sizes: dict[str, int], told: dict[str, str]) -> bool:
    """Find the one unknown name of a size; returns whether there is nothing left to find."""
    unknown = [name for name in item.wanted.names if name not in sizes]
    if len(unknown) == 1:
        found = item.wanted.solve(unknown[0], sizes, item.given)
        if found is not None:
            sizes[unknown[0]], told[unknown[0]] = found, item.where
            return True
    return not unknown


def _check(item: Shown, sizes: Mapping[str, int], told: Mapping[str, str]) -> None:
    unknown = sorted(item.wanted.names - sizes.keys())
    if unknown:
        line = _line(item.wanted.tree, unknown[0], sizes) if len(unknown) == 1 else None
        if line is not None and line[0]:  # it has been tried, and nothing divides
            raise Unsolved(f"{item.where} is {item.given}, and has to be {item.wanted.text}")
        return
    try:
        value = item.wanted.value(sizes)
    except ZeroDivisionError:
        value = None
    if value == item.given:
        return
    names = sorted(item.wanted.names)
    if item.wanted.is_name and item.wanted.text in told:
        name = item.wanted.text
        raise Unsolved(
            f"size {name!r} is {item.given} in {item.where}, and {sizes[name]} in {told[name]}"
        )
    because = ", ".join(f"{n} = {sizes[n]} in {told[n]}" for n in names)
    wanted = f"{item.wanted.text}" + (f" = {value}" if names and value is not None else "")
    reason = f" ({because})" if because else ""
    raise Unsolved(f"{item.where} is {item.given}, and has to be {wanted}{reason}")
