"""Sizes over names: text such as ``2*n + 1``, `tirx.Var` and expressions over some."""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from fx2relax.compat import is_prim_expr, tirx
from fx2relax.spec import Dim

_TEXT: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@functools.cache
def _signs() -> dict[type, tuple[str, Callable[[Any, Any], Any]]]:
    return {
        tirx.Add: ("+", operator.add),
        tirx.Sub: ("-", operator.sub),
        tirx.Mul: ("*", operator.mul),
        tirx.FloorDiv: ("//", operator.floordiv),
        tirx.FloorMod: ("%", operator.mod),
        tirx.Min: ("min", lambda a, b: _extreme(a, b, min, torch.sym_min, tirx.min)),
        tirx.Max: ("max", lambda a, b: _extreme(a, b, max, torch.sym_max, tirx.max)),
    }


def is_term(size: Any) -> bool:
    """Whether this is a TIR variable, or an expression over some."""
    return isinstance(size, tirx.Var) or type(size) in _signs()


def evaluate(size: Any, known: Callable[[Any], Any]) -> Any:
    """What a size is.

    Args:
        size: an int, a name, a `Dim`, text, a `tirx.Var` or an expression.
        known: what a name or a variable is: an int, a SymInt or a TIR expression.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(size, int):
        return size
    if isinstance(size, tirx.IntImm):
        return int(size.value)
    if isinstance(size, Dim):
        return known(size.name)
    if isinstance(size, str):
        return known(size) if size.isidentifier() else _of_text(_parsed(size), known)
    if isinstance(size, tirx.Var):
        return known(size)
    if isinstance(size, tirx.Cast):
        return evaluate(size.value, known)
    if type(size) not in _signs():
        raise ValueError(f"a size cannot be {size!r}")
    _, rule = _signs()[type(size)]
    return rule(evaluate(size.a, known), evaluate(size.b, known))


def names(size: Any) -> list[Any]:
    """The names and variables in a size.

    Raises:
        ValueError: it is no size.
    """
    found: list[Any] = []

    def note(name: Any) -> int:
        found.append(name)
        return 2  # a number that can be divided by

    evaluate(size, note)
    return found


def text(size: Any) -> str:
    """A TIR expression as Python's text.

    Raises:
        ValueError: Python has no text for it.
    """
    if isinstance(size, tirx.Var):
        return str(size.name)
    if isinstance(size, tirx.IntImm):
        return str(int(size.value))
    if type(size) not in _signs():
        raise ValueError(f"a size is made with + - * // % max min, not {size}")
    sign, _ = _signs()[type(size)]
    a, b = text(size.a), text(size.b)
    return f"{sign}({a}, {b})" if sign.isalpha() else f"({a} {sign} {b})"


def prim(size: Any) -> Any:
    """An int as a TIR constant."""
    return tirx.const(size, "int64") if isinstance(size, int) else size


def _parsed(written: str) -> ast.expr:
    try:
        return ast.parse(written, mode="eval").body
    except SyntaxError:
        raise ValueError(
            f"{written!r} is no size: it is a name, or text such as '2*n + 1'"
        ) from None


def _of_text(node: ast.expr, known: Callable[[str], Any]) -> Any:
    if isinstance(node, ast.Name):
        return known(node.id)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _TEXT:
        return _TEXT[type(node.op)](_of_text(node.left, known), _of_text(node.right, known))
    raise ValueError(f"a size is made of names and ints with + - * // %, not {ast.unparse(node)!r}")


def _extreme(a: Any, b: Any, plain: Any, symbolic: Any, of_prims: Any) -> Any:
    if is_prim_expr(a) or is_prim_expr(b):
        return of_prims(prim(a), prim(b))
    return plain(a, b) if isinstance(a, int) and isinstance(b, int) else symbolic(a, b)
