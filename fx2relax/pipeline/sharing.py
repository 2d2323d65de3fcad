"""One transform of the weights for several functions of a module.

The functions of an export (``prefill`` and ``decode``) take one list of weights. What all of them
compute from weights alone moves into one function, ``transform_params``: one tuple of weights in,
one tuple out. It is called once, and each function takes what it returned in place of the weights.

TVM's `LiftTransformParams` does the same, but counts bindings, and so finds nothing where one
function writes an expression twice; gives up where a function holds any `match_cast`; looks at
dataflow blocks alone; and says nothing of what it left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tvm
from tvm import relax
from tvm.relax.utils import copy_with_new_vars

from ..compat import TensorType, Var, is_prim_expr, type_of
from .alike import SharedWeightsError, alike, taking_weights
from .flow import bindings, name_of, result_of
from .lift import SHARED, TRANSFORM, TRANSFORMS
from .lifted import Kept, Lifted, Shared, size_of
from .values import Value, Values

# A result of so many times the bytes of the weights that it comes from is not worth its memory.
_MOST = 2
# These only say in which order or shape the elements of a tensor are read.
_VIEWS = frozenset(
    f"relax.{name}" for name in ("permute_dims", "reshape", "expand_dims", "squeeze", "flatten")
)


def lift_weights(mod: Any, shared: bool | Sequence[str] = True) -> Shared:
    """Move work on weights alone out of the functions of a module.

    Args:
        mod: public Relax functions with ``num_input``, in normal form. It is not changed.
        shared: True moves what all functions do into one ``transform_params``, a list of names
            what the named ones do, the others staying as they are; False moves all that each
            function does into a ``<name>_transform_params`` of its own.

    Returns:
        the module, what was lifted, and what was not and why; see `Shared`.

    Raises:
        SharedWeightsError: see `share_transforms`.
    """
    if not isinstance(shared, bool):
        return share_transforms(mod, shared)
    if shared:
        return share_transforms(mod)
    result = Shared(mod, (), (), {})
    for name in taking_weights(mod, None):
        own = _share(result.mod, [name], name + TRANSFORM)
        result = Shared(
            own.mod,
            result.lifted + own.lifted,
            result.kept + own.kept,
            {**result.transforms, **own.transforms},
        )
    return result


def share_transforms(mod: Any, functions: Sequence[str] | None = None) -> Shared:
    """Move what functions compute from weights alone into one ``transform_params``.

    A computation moves if each function either does it too, or uses none of the weights that it
    is made of; so nothing is held twice because one function needs a weight as it was and another
    its transpose. Equal computations are found whatever their variables are called and in
    whatever order they are bound, twice in one function, behind a `match_cast`, and outside
    dataflow blocks. What stays is reported: effects and calls back into PyTorch, results of more
    than twice the bytes of the weights that they come from, of a size that depends on data, or
    that only show a weight in another order that is needed as it is as well, and work inside
    branches and loops.

    Each function then takes one new list of weights: those that are still read as they are, in
    their order, then the results, by function name and in the order of their bindings, each named
    after the variable that held it. A weight that no function reads is gone. Sizes of weights
    that were symbols stay so: where the new list does not show one that a function needs and that
    its inputs do not show either, the first of the new weights is a shape of them.

    Args:
        mod: public Relax functions with ``num_input``, in normal form, that take the same list of
            weights right of it. It is not changed.
        functions: the names of those to look at; all with weights when left out. The others stay
            as they are.

    Returns:
        the module, what was lifted, and what was not and why. Where nothing is lifted the module
        is the given one. ``transform_params`` takes one tuple of the weights and returns one.

    Raises:
        SharedWeightsError: (a ValueError) the functions' weights differ in number, name, shape or
            dtype; a name is not a function's with ``num_input``; or another function calls one.
    """
    return _share(mod, taking_weights(mod, functions), SHARED)


def _share(mod: Any, names: list[str], transform: str) -> Shared:
    if not names:
        return Shared(mod, (), (), {})
    if transform in [g.name_hint for g in mod.get_global_vars()]:
        raise SharedWeightsError(f"the module has a function {transform!r} already")
    found = _Found(mod, names)
    kept, lifted = found.kept(), found.lifted()
    if not found.lifts:
        return Shared(mod, lifted, kept, {})
    mod = mod.clone()
    sizes = found.sizes()
    changed = {name: found.function(name, sizes) for name in names}
    for name, function in changed.items():
        del mod[name]
        mod[name] = copy_with_new_vars(function)
    mod[transform] = copy_with_new_vars(found.transform(transform, sizes))
    return Shared(mod, lifted, kept, dict.fromkeys(names, transform))


class _Found:
    """What can be lifted out of some functions.

    Attributes:
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
        # Numbers, or symbols of which the analyzer must be sure.
        limit = size_of(value.ty) <= _MOST * given
        return bool(limit) if isinstance(limit, bool) else _proved(limit)

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
                if sources and all(v in env for v in free) and isinstance(binding.value, tvm.ir.Call):
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

    def sizes(self) -> list[Any]:
        """The symbols that some function needs and can find nowhere."""
        missing = []
        for name in self.names:
            free = set(relax.analysis.free_symbolic_vars(self.function(name, [])))
            missing += [s for s in free if s not in missing]
        order = [s for w in self.values.weights for s in relax.analysis.tir_vars_in_type(w.ty)]
        return [s for s in dict.fromkeys(order) if s in missing]

    def function(self, name: str, sizes: list[Any]) -> Any:
        """One of the functions over the new list of weights."""
        func, env = self.functions[name], self.known[name]
        leading = int(func.attrs["num_input"])
        own = func.params[leading:]
        survivors = [own[n] for n in self.survivors]
        names = self.new_names()[len(survivors) :]
        results = [Var(n, value.ty) for n, value in zip(names, self.outputs, strict=True)]
        given = {value.var: var for value, var in zip(self.outputs, results, strict=True)}
        inside = {value.var for value in self.lifts}
        blocks = []
        for block in func.body.blocks:
            left = []
            for binding in block.bindings:
                found = env.get(binding.var)
                if found in given:
                    left.append(relax.VarBinding(binding.var, given[found]))
                elif found is None or found not in inside:
                    left.append(binding)
            if left:
                blocks.append(type(block)(left))
        shapes = [Var("weight_sizes", relax.ShapeType(sizes))] if sizes else []
        params = [*func.params[:leading], *shapes, *survivors, *results]
        body = relax.SeqExpr(blocks, func.body.body)
        made = relax.Function(params, body, func.ret_ty, func.is_pure, func.attrs)
        made = relax.transform.CanonicalizeBindings()(tvm.IRModule({"main": made}))["main"]
        return relax.analysis.remove_all_unused(made)

    def transform(self, name: str, sizes: list[Any]) -> Any:
        """The function that makes the new list of weights."""
        weights, values = self.values.weights, self.values
        params = Var("params", relax.TupleType([type_of(w) for w in weights]))
        builder = relax.BlockBuilder()
        attrs = {"num_input": 0, TRANSFORMS: self.names}
        env: dict[Any, Any] = {}

        def make(var: Any) -> Any:
            if var in env:
                return env[var]
            if var in values.places:
                expr: Any = relax.TupleGetItem(params, values.places[var])
            else:
                value = values.of[var]
                for part in values.parts(value):
                    make(part)
                expr = values.renamed(value.expr, env)
                if value.cast:
                    env[var] = builder.match_cast(expr, value.ty)
                    return env[var]
            expr = builder.normalize(expr)
            env[var] = relax.DataflowVar(str(var.name), expr.ty)
            builder.emit_normalized(relax.VarBinding(env[var], expr))
            return env[var]

        with builder.function(name, [params], attrs=attrs):
            with builder.dataflow():
                results = [make(value.var) for value in self.outputs]
                fields = [make(weights[n]) for n in self.survivors] + results
                shapes = [relax.ShapeExpr(sizes)] if sizes else []
                output = builder.emit_output(relax.Tuple([*shapes, *fields]), "output")
            builder.emit_func_output(output)
        return builder.get()[name]


def _leaves(expr: Any) -> list[Any]:
    return list(relax.analysis.free_vars(expr))


def _is_view(value: Value) -> bool:
    return name_of(value.expr) in _VIEWS and len(relax.analysis.free_vars(value.expr)) == 1


def _proved(condition: Any) -> bool:
    return bool(tvm.sym.Analyzer().can_prove(condition))


def _number(size: Any) -> int | None:
    return size if isinstance(size, int) else None


def _readable(value: Value, values: Values) -> str:
    """The variable's name; one that a builder made up says nothing, and what is computed does."""
    name = value.name
    if name.rstrip("0123456789") not in ("lv", "gv"):
        return name
    first = values.weights[min(value.sources)].name
    return f"{first}_{value.operator.strip('[]')}"


def _nested(expr: Any) -> list[Any]:
    """The bindings inside an expression: in the branches of a condition, in a function."""
    found: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, relax.SeqExpr):
            found.extend(b for block in node.blocks for b in block.bindings)

    relax.analysis.post_order_visit(expr, visit)
    return found
