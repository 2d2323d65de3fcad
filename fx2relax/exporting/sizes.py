"""The sizes of an export: which are one size, what they are called, what is known of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree

from fx2relax.capture_inputs import Inputs, Maker, is_pair
from fx2relax.compat import shape_values, tirx
from fx2relax.size_terms import evaluate, is_term, names, text
from fx2relax.spec import Dim, Tensor


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
                found += [size for size in shape if isinstance(size, (Dim, str)) or is_term(size)]
        for size in found:
            if isinstance(size, Dim) and self.known.setdefault(size.name, size) != size:
                raise ValueError(f"{self.known[size.name]} and {size} are one size")
        # Names first, so that they stay as they are.
        for size in found:
            if isinstance(size, str):
                for name in names(size):
                    self.known.setdefault(name, Dim(name))
        for size in found:
            for var in names(size) if is_term(size) else ():
                self.name(var)

    def name(self, var: Any) -> str:
        """What a variable is called in this export."""
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
        return evaluate(size, self._known)

    def _known(self, size: Any) -> Any:
        name = size if isinstance(size, str) else self.sizes.name(size)
        # A function has variables of its own: TVM does not take one in two of them.
        return self.symbol(name, tirx.Var(name, "int64"), self.sizes.known[name])


def shape_text(ty: Any) -> tuple[int | str, ...]:
    """The sizes of a Relax tensor or shape type: ints, and text over the names of variables."""
    return tuple(v if isinstance(v, int) else text(v) for v in shape_values(ty) or ())


def _identity(var: Any) -> Any:
    return hash(var), str(var.name)
