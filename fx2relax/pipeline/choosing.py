"""Which work on weights alone is worth doing once for several functions, and what stays and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import tvm
from tvm import relax

from ..compat import TensorType, is_prim_expr, type_of
from .alike import alike
from .flow import bindings, name_of, result_of
from .lifted import Kept, Lifted, size_of
from .values import Value, Values

# A result of so many times the bytes of the weights that it comes from is not worth its memory.
_MOST = 2
# These only say in which order or shape the elements of a tensor are read.
_VIEWS = frozenset(
    f"relax.{name}" for name in ("permute_dims", "reshape", "expand_dims", "squeeze", "flatten")
)
# Names that block builders and PyTorch's tracers give what the user has no name for.
_MADE_UP = frozenset(
    [
        "lv",
        "gv",
        "t",
        "numpy_t",
        "permute",
        "transpose",
        "view",
        "reshape",
        "cat",
        "concat",
        "unsqueeze",
        "squeeze",
        "expand",
        "getitem",
        "add",
        "sub",
        "mul",
        "div",
        "neg",
        "pow",
        "to",
        "clone",
    ]
)


class Chosen:
    """What is lifted out of some functions of a module.

    Attributes:
        names: the functions', in alphabetical order.
        functions: by name, the sizes of their weights being the same symbols.
        values: their work on weights.
        known: by function, what its variables stand for, see `Values.read`.
        lifts: the values that are, in order.
        outputs: those of them that a function needs.
        survivors: the places of the weights that a function needs as they are.
    """

    def __init__(self, mod: Any, names: list[str]) -> None:
        self.names = names
        self.functions, weights = alike(mod, names)
        self.values = Values(mod, weights)
        self.known: dict[str, dict[Any, Any]] = {}
        self.weights_of: dict[str, frozenset[int]] = {}
        for name, function in self.functions.items():
            own = function.params[int(function.attrs["num_input"]) :]
            env = dict(zip(own, weights, strict=True))
            self.known[name] = self.values.read(name, function, env)
            self.weights_of[name] = self._used(name)
        self.why: dict[Any, str] = {}
        self.lifts = self._common()
        self._settle()

    def _used(self, name: str) -> frozenset[int]:
        """The places of the weights that a function reads at all."""
        env, func = self.known[name], self.functions[name]
        expressions = [*(b.value for b in bindings(func)), result_of(func)]
        read = {v for e in expressions for v in relax.analysis.free_vars(e)}
        return frozenset(n for v in read if v in env for n in self.values.sources(env[v]))

    def _common(self) -> list[Value]:
        """What every function does, or all those that use its weights."""
        found = []
        for value in self.values.all:
            if not value.sources:
                continue  # a constant: each function makes its own
            others = [
                name
                for name in self.names
                if name not in value.functions and value.sources & self.weights_of[name]
            ]
            if value.why:
                self.why[value.var] = value.why
            elif others and not isinstance(value.expr, relax.TupleGetItem):
                used = self._list(value.sources & self.weights_of[others[0]])
                does = ", ".join(sorted(value.functions))
                self.why[value.var] = f"only in {does}; {others[0]} uses {used} in another way"
            else:
                found.append(value)
        return self._closed(found)

    def _list(self, places: Iterable[int]) -> str:
        return ", ".join(self.values.weights[n].name for n in sorted(places))

    def _closed(self, values: list[Value]) -> list[Value]:
        """Without those that read what stays."""
        left: list[Value] = []
        inside = set()
        for value in values:
            stays = [
                v
                for v in self.values.parts(value)
                if v in self.values.of and v not in inside and self.values.of[v].sources
            ]
            if stays:
                self.why[value.var] = f"it reads {stays[0].name}, which stays"
            else:
                left.append(value)
                inside.add(value.var)
        return left

    def _settle(self) -> None:
        """Take back what does not pay as a result, until nothing changes."""
        while True:
            inside = {value.var for value in self.lifts}
            needed = {v for name in self.names for v in self._needed(name, inside)}
            self.outputs = [value for value in self.lifts if value.var in needed]
            weights = self.values.weights
            self.survivors = [n for n, weight in enumerate(weights) if weight in needed]
            back = [value for value in self.outputs if self._stays(value, needed)]
            if not back:
                break
            self.lifts = self._closed([v for v in self.lifts if v not in back])
        if not self.outputs:
            self.lifts = []

    def _needed(self, name: str, inside: set[Any]) -> Iterator[Any]:
        """The weights and values that are read by what a function still does."""
        env = self.known[name]
        for expr in self._remaining(name, inside):
            for var in relax.analysis.free_vars(expr):
                if var in env:
                    yield from _leaves(env[var])

    def _remaining(self, name: str, inside: set[Any]) -> Iterator[Any]:
        func, env = self.functions[name], self.known[name]
        for binding in bindings(func):
            found = env.get(binding.var)
            if found is None or (found in self.values.of and found not in inside):
                yield binding.value
        yield result_of(func)

    def _stays(self, value: Value, needed: set[Any]) -> bool:
        """Whether a result is not worth its memory; the reason is noted."""
        why = ""
        if not isinstance(value.ty, TensorType):
            why = "it is no tensor"
        elif _is_view(value):
            (source,) = self.values.parts(value)
            if source in needed:
                why = f"it shows {source.name}, which is needed as it is, in another order"
        if not why and not self._pays(value):
            why = f"it is more than {_MOST} times as large as the weights that it comes from"
        if why:
            self.why[value.var] = why
        return bool(why)

    def _pays(self, value: Value) -> bool:
        given = sum(size_of(type_of(self.values.weights[n])) for n in value.sources)
        return _never_negative(_MOST * given - size_of(value.ty), self.values.symbols)

    def lifted(self) -> tuple[Lifted, ...]:
        """The report of what is lifted."""
        names = self.new_names()[len(self.survivors) :]
        return tuple(
            Lifted(
                name,
                self.values.text(value.var),
                tuple(self.values.weights[n].name for n in sorted(value.sources)),
                _number(size_of(value.ty)),
                tuple(sorted(value.functions)),
            )
            for name, value in zip(names, self.outputs, strict=True)
        )

    def kept(self) -> tuple[Kept, ...]:
        """The report of what is not."""
        found = []
        for value in self.values.all:
            why = self.why.get(value.var)
            if why and not isinstance(value.expr, relax.TupleGetItem):
                functions = tuple(sorted(value.functions))
                found.append(Kept(value.name, self.values.text(value.var), why, functions))
        for name in self.names:
            found.extend(self._inside(name))
        return tuple(found)

    def _inside(self, name: str) -> Iterator[Kept]:
        """Work on weights inside branches and loops of a function, which nobody lifts."""
        env = self.known[name]
        for outer in bindings(self.functions[name]):
            if outer.var in env:
                continue
            for binding in _nested(outer.value):
                free = [v for v in relax.analysis.free_vars(binding.value) if not is_prim_expr(v)]
                sources = {n for v in free if v in env for n in self.values.sources(env[v])}
                if (
                    sources
                    and all(v in env for v in free)
                    and isinstance(binding.value, tvm.ir.Call)
                ):
                    operator = name_of(binding.value).removeprefix("relax.")
                    what = f"{operator}({self._list(sources)})"
                    why = f"it is inside a branch or a function, {outer.var.name}"
                    yield Kept(str(binding.var.name), what, why, (name,))

    def new_names(self) -> list[str]:
        """The names of the new list of weights, none twice."""
        names: list[str] = [self.values.weights[n].name for n in self.survivors]
        for value in self.outputs:
            name, count = _readable(value, self.values), 0
            base = name
            while name in names:
                count += 1
                name = f"{base}_{count}"
            names.append(name)
        return names


def _leaves(expr: Any) -> list[Any]:
    return list(relax.analysis.free_vars(expr))


def _is_view(value: Value) -> bool:
    return name_of(value.expr) in _VIEWS and len(relax.analysis.free_vars(value.expr)) == 1


def _never_negative(number: Any, symbols: Iterable[Any]) -> bool:
    """Whether a number is 0 or more, whatever its symbols, which are sizes, are."""
    if isinstance(number, (int, float)):
        return number >= 0
    analyzer = tvm.sym.Analyzer()
    for symbol in symbols:
        analyzer.bind(symbol, tvm.ir.Range(0, 1 << 31))
    return bool(analyzer.const_int_bound(analyzer.canonical_simplify(number)).min_value >= 0)


def _number(size: Any) -> int | None:
    return size if isinstance(size, int) else None


def _readable(value: Value, values: Values) -> str:
    """The variable's name; where that is made up, the weight's and what is computed of it."""
    base, _, number = value.name.rpartition("_")
    plain = base if number.isdigit() else value.name
    if plain.rstrip("0123456789") not in _MADE_UP:
        return value.name
    first = values.weights[min(value.sources)].name
    operator = value.operator.strip("[]")
    return f"{first}_{'t' if operator == 'permute_dims' else operator}"


def _nested(expr: Any) -> list[Any]:
    """The bindings inside an expression: in the branches of a condition, in a function."""
    found: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, relax.SeqExpr):
            found.extend(b for block in node.blocks for b in block.bindings)

    relax.analysis.post_order_visit(expr, visit)
    return found
