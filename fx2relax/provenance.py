"""Which node of a graph each Relax variable comes from, from import to fused kernels.

The variables of an imported function are named after their nodes; passes keep the names of what
they keep. Where chains are fused, values are followed: what is computed in the same way of the
same values is the same value.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fx2relax.compat import relax

# Passes add to names, or count them; the letter keeps what they count apart.
_MARKED = re.compile(r"^.*?__\d+v")


@dataclass
class Site:
    """One call of a program's function, in the order in which it runs.

    Attributes:
        symbol: the kernel's, or the packed function's.
        kind: "kernel", or "packed".
        nodes: the nodes that it computes, in the graph's order.
        variable: the name of the variable that holds its value before fused chains are one.
        inputs: the types of what it reads.
        output: the type of what it gives.
    """

    symbol: str
    kind: str
    nodes: list[str] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    output: Any = None
    variable: str = ""


class Trail:
    """Follows the nodes of one function through the passes.

    Args:
        name: the function's.
        origins: what `renaming.named_after_nodes` returned.
        order: the nodes' names, in the graph's order.
    """

    def __init__(self, name: str, origins: dict[str, str], order: Sequence[str]) -> None:
        self.name = name
        self.origins = origins
        self.place = {node: n for n, node in enumerate(order)}
        #: Nodes whose work is done once, on the weights alone.
        self.lifted: set[str] = set()

    def node_of(self, name: str) -> str | None:
        """The node that a variable is named after, also where a pass has added to the name."""
        marked = _MARKED.match(name)
        return None if marked is None else self.origins.get(marked.group())

    def sites(self, imported: Any, legal: Any, grouped: Any, final: Any, ready: Any) -> list[Site]:
        """The calls of the final module, with the nodes that each computes.

        Args:
            imported: the module after import.
            legal: before its kernels were grouped.
            grouped: after that.
            final: what `pipeline.lower` returned.
            ready: what machine code is made of: some kernels have become views by then.
        """
        own = self._by_variable(imported, legal)
        groups = _grouped(legal[self.name], grouped, self.name, own)
        sites, waiting = [], list(groups)
        left = Counter(_signature(b.value) for b in bindings(ready[self.name]))
        for binding in bindings(final[self.name]):
            site = _site(binding)
            if site is None:
                node = self.node_of(binding.var.name)
                for inner in _called(final, binding.value):
                    inner.nodes = [] if node is None else [node]
                    sites.append(inner)
                continue
            nodes, site.variable = self._take(binding.var.name, waiting)
            site.nodes = sorted(nodes, key=lambda n: self.place.get(n, len(self.place)))
            signature = _signature(binding.value)
            if left[signature]:
                left[signature] -= 1
                sites.append(site)
        return sites

    def _take(self, name: str, waiting: list[_Made]) -> tuple[set[str], str]:
        for n, made in enumerate(waiting):
            if made.name == name:
                del waiting[n]
                return made.nodes, made.value
        node = self.node_of(name)
        return (set() if node is None else {node}), name

    def _by_variable(self, before: Any, legal: Any) -> dict[Any, set[str]]:
        """For each variable that is left, the nodes whose work it has taken over."""
        survivors = [b.var for b in bindings(legal[self.name])]
        found: dict[Any, set[str]] = {}
        by_node: dict[str, list[Any]] = defaultdict(list)
        for var in survivors:
            node = self.node_of(var.name)
            found[var] = set() if node is None else {node}
            if node is not None:
                by_node[node].append(var)
        names = [g.name_hint for g in legal.get_global_vars()]
        once = self._on_weights(before) if f"{self.name}_transform_params" in names else set()
        users = self._users(before[self.name])
        for node in reversed(list(self.place)):
            if node in by_node or node in once:
                continue
            places = [by_node[heir][0] for heir in users[node] if by_node.get(heir)]
            by_node[node] = places[:1]
            for var in places[:1]:
                found[var].add(node)
        self.lifted = once
        self._name_results(before[self.name], legal[self.name], found)
        self._pass_on(legal[self.name], found)
        return found

    def _on_weights(self, imported: Any) -> set[str]:
        """The nodes that read nothing but weights."""
        function = imported[self.name]
        leading = int(function.attrs["num_input"])
        varying = set(function.params[:leading])
        found: dict[str, bool] = {}
        for binding in bindings(function):
            varies = any(v in varying for v in relax.analysis.free_vars(binding.value))
            if varies:
                varying.add(binding.var)
            node = self.origins.get(binding.var.name)
            if node is not None:
                found[node] = found.get(node, True) and not varies
        return {node for node, alone in found.items() if alone}

    def _users(self, function: Any) -> dict[str, list[str]]:
        """For each node, the nodes that read what it makes, nearest first."""
        users: dict[str, list[str]] = {node: [] for node in self.place}
        for binding in bindings(function):
            own = self.origins.get(binding.var.name)
            for var in relax.analysis.free_vars(binding.value):
                source = self.origins.get(var.name)
                if own is not None and source is not None and source != own:
                    users.setdefault(source, []).append(own)
        return users

    def _name_results(self, before: Any, after: Any, found: dict[Any, set[str]]) -> None:
        """Let what makes a result of constants, a copy, be the work of the node that it is of."""
        for old, new in zip(_results(before), _results(after), strict=False):
            node = self.origins.get(getattr(old, "name", ""))
            if node is not None and new in found and not found[new]:
                found[new] = {node}

    def _pass_on(self, function: Any, found: dict[Any, set[str]]) -> None:
        """Let what a pass has added (a transpose, a cast) be the work of who reads it."""
        readers: dict[Any, list[Any]] = defaultdict(list)
        every = list(bindings(function))
        for binding in every:
            for var in relax.analysis.free_vars(binding.value):
                readers[var].append(binding.var)
        # What only the results read is the work of where it comes from.
        for ordered, near in (
            (every[::-1], lambda b: readers[b.var]),
            (every, lambda b: relax.analysis.free_vars(b.value)),
        ):
            for binding in ordered:
                known = [var for var in near(binding) if found.get(var)]
                if known and not found.get(binding.var):
                    found[binding.var] = {max(found[known[0]], key=self._late)}

    def _late(self, node: str) -> int:
        return self.place.get(node, -1)


@dataclass
class _Made:
    """A variable of the function after grouping: its nodes, and what it was called before."""

    name: str
    nodes: set[str]
    value: str


def bindings(function: Any) -> Iterator[Any]:
    """The bindings of a Relax function's variables to values, in order."""
    body = function.body
    for block in body.blocks if isinstance(body, relax.SeqExpr) else ():
        for binding in block.bindings:
            if isinstance(binding, relax.VarBinding):
                yield binding


def _results(function: Any) -> list[Any]:
    """What a function returns, as variables or constants."""
    values = {binding.var: binding.value for binding in bindings(function)}
    made = values.get(function.body.body, function.body.body)
    return list(made.fields) if isinstance(made, relax.Tuple) else [made]


def _signature(value: Any) -> Any:
    """What is called with which variables, whether or not it is given the memory of its result."""
    operator: Any = getattr(value, "op", None)
    name = str(getattr(operator, "name", ""))
    if name in ("relax.call_tir", "relax.call_dps_packed"):
        return symbol_of(value.args[0]), _names(value.args[1].fields)
    if name in ("relax.call_packed", "relax.call_pure_packed"):
        return symbol_of(value.args[0]), _names(value.args[1:])
    return (symbol_of(operator), _names(value.args)) if hasattr(value, "args") else None


def symbol_of(target: Any) -> str:
    """The name of a kernel or of a packed function; empty for all else."""
    return str(getattr(target, "name_hint", "") or getattr(target, "global_symbol", ""))


def _names(operands: Iterable[Any]) -> tuple[str, ...]:
    named = [x.name for x in operands if isinstance(x, relax.Var)]
    # The memory of a result has a name that tells nothing.
    return tuple(name for name in named if not name.startswith(("alloc", "result")))


def _site(binding: Any) -> Site | None:
    value = binding.value
    name = str(getattr(getattr(value, "op", None), "name", ""))
    if name == "relax.call_tir":
        inputs = [x.ty for x in value.args[1].fields]
        return Site(value.args[0].name_hint, "kernel", [], inputs, binding.var.ty)
    if name in ("relax.call_dps_packed", "relax.call_pure_packed"):
        given = value.args[1].fields if name == "relax.call_dps_packed" else value.args[1:]
        symbol = str(value.args[0].global_symbol)
        return Site(symbol, "packed", [], [x.ty for x in given], binding.var.ty)
    if isinstance(getattr(value, "op", None), relax.ExternFunc):
        symbol = str(value.op.global_symbol)
        return Site(symbol, "packed", [], [x.ty for x in value.args], binding.var.ty)
    return None


def _called(mod: Any, expr: Any) -> Iterator[Site]:
    """What a function of a module calls that an expression calls: that of a `torch.cond`."""
    if isinstance(expr, relax.If):
        yield from _called(mod, expr.true_branch)
        yield from _called(mod, expr.false_branch)
    elif isinstance(expr, relax.SeqExpr):
        for binding in (b for block in expr.blocks for b in block.bindings):
            site = _site(binding)
            yield from _called(mod, binding.value) if site is None else [site]
    else:
        function = _callee(expr, mod)
        if function is not None:
            yield from _called(mod, function.body)


def _grouped(legal: Any, grouped: Any, name: str, own: dict[Any, set[str]]) -> list[_Made]:
    """The variables of the function after grouping, in order."""
    known: dict[Any, list[Any]] = defaultdict(list)
    numbers: dict[Any, Any] = {}
    named = {}
    for binding in bindings(legal):
        known[_key(binding.value, numbers)].append(binding.var)
        if _MARKED.match(binding.var.name):
            named[binding.var.name] = binding.var
        numbers[binding.var] = binding.var.name
    found = []
    standing: dict[Any, Any] = {v: v.name for v in grouped[name].params}
    for binding in bindings(grouped[name]):
        value = binding.value
        callee = _callee(value, grouped)
        if callee is None:
            # What reads a value that was not followed has kept its name.
            twin = _twin(known, _key(value, standing))
            twin = named.get(binding.var.name) if twin is None else twin
            standing[binding.var] = twin.name if twin is not None else binding.var.name
            nodes = own.get(twin, set()) if twin is not None else set()
            found.append(_Made(binding.var.name, nodes, str(standing[binding.var])))
            continue
        inner = {p: _key(a, standing) for p, a in zip(callee.params, value.args, strict=True)}
        nodes = set()
        last = None
        for step in bindings(callee):
            twin = _twin(known, _key(step.value, inner))
            if twin is not None:
                nodes |= own.get(twin, set())
                last = inner[step.var] = twin.name
            else:
                inner[step.var] = f"{binding.var.name}/{step.var.name}"
        standing[binding.var] = last if last is not None else binding.var.name
        found.append(_Made(binding.var.name, nodes, str(standing[binding.var])))
    return found


def _callee(value: Any, mod: Any) -> Any:
    """The function of fused steps that an expression calls."""
    target: Any = getattr(value, "op", None)
    if not hasattr(target, "name_hint"):
        return None
    function = mod[target.name_hint]
    return function if isinstance(function, relax.Function) else None


def _twin(known: dict[Any, list[Any]], key: Any) -> Any:
    """A variable that holds the same value; each is given once while there is another."""
    held = known.get(key)
    if not held:
        return None
    return held.pop(0) if len(held) > 1 else held[0]


def _key(value: Any, numbers: dict[Any, Any]) -> Any:
    """What an expression computes, of which values."""
    if isinstance(value, relax.Var):
        return numbers.get(value, value.name)
    if isinstance(value, relax.Tuple):
        return tuple(_key(x, numbers) for x in value.fields)
    if isinstance(value, relax.TupleGetItem):
        return ("item", _key(value.tuple_value, numbers), value.index)
    operator = getattr(value, "op", None)
    if operator is not None:
        name = getattr(operator, "name", None) or getattr(operator, "name_hint", "")
        arguments = tuple(_key(x, numbers) for x in value.args)
        return (str(name), arguments, str(getattr(value, "ty_args", "")))
    if hasattr(value, "name_hint"):
        return value.name_hint
    if hasattr(value, "global_symbol"):
        return str(value.global_symbol)
    return str(value)
