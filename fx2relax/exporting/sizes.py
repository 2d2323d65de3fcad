"""The sizes of an export: which are one size, what they are called, what is known of them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree

from fx2relax.capture_inputs import Inputs, Maker, is_pair
from fx2relax.compat import const_int, shape_values, tirx
from fx2relax.spec import Dim, Tensor

_TEXT: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}
_EXPRESSIONS: dict[type, Callable[[Any, Any], Any]] = {
    tirx.Add: lambda a, b: a + b,
    tirx.Sub: lambda a, b: a - b,
    tirx.Mul: lambda a, b: a * b,
    tirx.FloorDiv: lambda a, b: a // b,
    tirx.FloorMod: lambda a, b: a % b,
}
_SIGNS: dict[type, str] = {
    tirx.Add: "+",
    tirx.Sub: "-",
    tirx.Mul: "*",
    tirx.FloorDiv: "//",
    tirx.FloorMod: "%",
}


class Sizes:
    """Every size that the specs of one export name.

    A name is one size in every function and in the weights. Variables are told apart by identity:
    a second one of a name that is taken is called otherwise.

    Args:
        specs: of all functions, and of the weights that have symbolic sizes.

    Raises:
        ValueError: two `Dim` of one name that differ, or text that is no size.
    """

    def __init__(self, specs: Any) -> None:
        self.known: dict[str, Dim] = {}
        self._variables: dict[Any, str] = {}
        found: list[Any] = []
        for leaf in pytree.tree_leaves(specs, is_leaf=is_pair):
            shape = leaf.shape if isinstance(leaf, Tensor) else leaf[0] if is_pair(leaf) else [leaf]
            if not isinstance(leaf, torch.Tensor):
                found += [size for size in shape if isinstance(size, (Dim, str)) or _is_expr(size)]
        for size in found:
            if isinstance(size, Dim) and self.known.setdefault(size.name, size) != size:
                raise ValueError(f"{self.known[size.name]} and {size} are one size")
        # Names first, so that they stay as they are.
        for size in found:
            if isinstance(size, str):
                for name in _names(size):
                    self.known.setdefault(name, Dim(name))
        for size in found:
            for var in _variables(size) if _is_expr(size) else ():
                self._name(var)

    def _name(self, var: Any) -> str:
        key = _identity(var)
        if key not in self._variables:
            name, count = str(var.name), 0
            while name in self.known:
                count += 1
                name = f"{var.name}_{count}"
            self.known[name] = Dim(name) if name.isidentifier() else Dim("size")
            self._variables[key] = name
        return self._variables[key]

    def maker(self, fixed: set[int]) -> Callable[[Inputs], Maker]:
        """What makes the fake values of one function.

        Args:
            fixed: numbers that no symbolic size may be taken for by accident.
        """
        return lambda inputs: _NamedMaker(inputs, fixed, self)


class _NamedMaker(Maker):
    """Makes fake values whose sizes have one name in all functions of an export."""

    def __init__(self, inputs: Inputs, fixed: set[int], sizes: Sizes) -> None:
        super().__init__(inputs, fixed)
        self.sizes = sizes

    def size(self, size: Any) -> Any:
        """An int, or the SymInt of a size in any of its spellings."""
        size = const_int(size)
        if isinstance(size, int):
            return size
        if isinstance(size, Dim):
            return self._named(size.name)
        if isinstance(size, str):
            return _evaluated(ast.parse(size, mode="eval").body, self._named)
        return self._expression(size)

    def _named(self, name: str) -> Any:
        # A function has variables of its own: TVM does not take one in two of them.
        return self.symbol(name, tirx.Var(name, "int64"), self.sizes.known[name])

    def _expression(self, size: Any) -> Any:
        size = const_int(size)
        if isinstance(size, int):
            return size
        if isinstance(size, tirx.Var):
            return self._named(self.sizes._name(size))
        rule = _EXPRESSIONS.get(type(size))
        if rule is None:
            raise ValueError(f"a size is made with + - * // %, not {size}")
        return rule(self._expression(size.a), self._expression(size.b))


def fixed_sizes(model: torch.nn.Module, specs: Any) -> set[int]:
    """The numbers among the sizes of weights and inputs."""
    found = {size for t in (*model.parameters(), *model.buffers()) for size in t.shape}
    for leaf in pytree.tree_leaves(specs, is_leaf=is_pair):
        shape = leaf[0] if is_pair(leaf) else getattr(leaf, "shape", ())
        found.update(s for s in shape if isinstance(s, int))
    return found


def shape_text(ty: Any) -> tuple[int | str, ...]:
    """The sizes of a Relax tensor or shape type: ints, and text over the names of variables."""
    return tuple(v if isinstance(v, int) else size_text(v) for v in shape_values(ty) or ())


def size_text(size: Any) -> str:
    """A TIR expression as Python's text."""
    if isinstance(size, tirx.Var):
        return str(size.name)
    if isinstance(size, tirx.IntImm):
        return str(int(size.value))
    if isinstance(size, (tirx.Max, tirx.Min)):
        function = "max" if isinstance(size, tirx.Max) else "min"
        return f"{function}({size_text(size.a)}, {size_text(size.b)})"
    sign = _SIGNS.get(type(size))
    if sign is None:
        raise ValueError(f"a size is made with + - * // % max min, not {size}")
    return f"({size_text(size.a)} {sign} {size_text(size.b)})"


def _is_expr(size: Any) -> bool:
    return isinstance(size, tirx.Var) or type(size) in _EXPRESSIONS


def _identity(var: Any) -> Any:
    return hash(var), str(var.name)


def _variables(size: Any) -> list[Any]:
    if isinstance(size, tirx.Var):
        return [size]
    if type(size) in _EXPRESSIONS:
        return [*_variables(size.a), *_variables(size.b)]
    return []


def _names(text: str) -> list[str]:
    """The names in the text of a size."""
    found: list[str] = []
    try:
        _evaluated(ast.parse(text, mode="eval").body, lambda name: found.append(name) or 2)  # type: ignore[func-returns-value]
    except SyntaxError:
        raise ValueError(f"{text!r} is no size: it is a name, or text such as '2*n + 1'") from None
    return found


def _evaluated(node: ast.expr, name: Callable[[str], Any]) -> Any:
    if isinstance(node, ast.Name):
        return name(node.id)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _TEXT:
        rule = _TEXT[type(node.op)]
        return rule(_evaluated(node.left, name), _evaluated(node.right, name))
    raise ValueError(f"a size is made of names and ints with + - * // %, not {ast.unparse(node)!r}")
