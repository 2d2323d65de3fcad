"""Relax variables under the names of the nodes that they were made for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fx2relax.compat import PyExprMutator, mutator, relax
from fx2relax.provenance import bindings


def named_after_nodes(
    mod: Any, name: str, made: Sequence[tuple[str, Iterable[Any]]]
) -> tuple[Any, dict[str, str], dict[str, tuple[str, int]]]:
    """Name the variables of a function after the nodes that they were made for.

    Args:
        mod: the module that was imported.
        name: the function's.
        made: for each node, in order, its name and what it stands for; what is no variable has
            a place among its results only.

    Returns:
        the module with other names; for each name the node; and for each name of a variable that
        is a result of its node, the node and the index among its results.
    """
    function = mod[name]
    ends: dict[Any, str] = {}
    results: dict[Any, tuple[str, int]] = {}
    for node, variables in made:
        for index, var in enumerate(variables):
            if isinstance(var, relax.Var) and var not in ends:
                ends[var] = node  # a later node that it also stands for has done nothing
                results[var] = node, index
    owners: dict[Any, str] = {}
    waiting: list[Any] = []
    for binding in bindings(function):
        waiting.append(binding.var)
        owner = ends.get(binding.var)
        if owner is not None:
            owners.update(dict.fromkeys(waiting, owner))
            waiting.clear()
    renamer = _Renamer(mod, owners)
    mod = mod.clone()
    mod[name] = renamer.visit_expr(function)
    made_of = {renamer.names[var]: of for var, of in results.items() if var in renamer.names}
    return mod, renamer.origins, made_of


@mutator
class _Renamer(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: Any, owners: dict[Any, str]) -> None:
        super().__init__(mod)
        self.owners = owners
        self.origins: dict[str, str] = {}
        self.names: dict[Any, str] = {}

    def visit_var_binding_(self, binding: Any) -> None:
        """A binding, of a variable that is named after its node."""
        node = self.owners.get(binding.var)
        if node is None or not isinstance(binding.var, relax.DataflowVar):
            super().visit_var_binding_(binding)
            return
        hint = f"{node}__{len(self.origins)}v"
        made = self.builder_.emit(self.visit_expr(binding.value), hint)
        self.origins[made.name] = node
        self.names[binding.var] = made.name
        self.set_var_remap(binding.var, made)
