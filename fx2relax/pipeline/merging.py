"""The transforms of several lowered functions as one, each distinct result once.

`lower` gives each function that needs its weights in another form (packed into panels, folded
with a BatchNorm) a transform of its own. Those of one module start from the same weights, and
what several of them make is made once here and held once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm_ffi
from tvm import relax, tirx
from tvm.relax.utils import copy_with_new_vars

from ..compat import Var, type_of
from .alike import SharedWeightsError
from .flow import bindings, result_of
from .lift import SHARED, TRANSFORM, TRANSFORMS, is_transform
from .values import Values


def merge_transforms(mod: Any) -> tuple[Any, dict[str, list[int]]]:
    """Merge the transforms of what `lower` returned into one ``transform_params``.

    Equal computations on the same weights become one, kernels that are equal but for their names
    included. A transform that `lift_weights` made before is the first step of it.

    Args:
        mod: what ``lower(..., lift_weights=True)`` returned, of functions that took one list of
            weights. It is not changed.

    Returns:
        the module, and by function the places of its weights in the result of
        ``transform_params``, in the order of its parameters. Where no function has a transform,
        the module is the given one and there are no places: the functions take the weights.
        A function that takes weights as they are finds them in the result, not copied.

    Raises:
        SharedWeightsError: (a ValueError) two transforms take different weights.
    """
    transforms = {
        name.name_hint: func
        for name, func in mod.functions_items()
        if isinstance(func, relax.Function) and is_transform(name.name_hint, func)
    }
    if not transforms:
        return mod, {}
    merged = _Merged(mod, transforms)
    places = {name: merged.places(name) for name in merged.functions()}
    mod = mod.clone()
    for name in transforms:
        del mod[name]
    mod[SHARED] = merged.function([n for n, found in places.items() if found is not None])
    found = {name: where for name, where in places.items() if where is not None}
    return relax.transform.DeadCodeElimination()(mod), found


class _Merged:
    """The computations of several transforms.

    Attributes:
        results: what the merged transform returns.
    """

    def __init__(self, mod: Any, transforms: Mapping[str, Any]) -> None:
        self.mod, self.transforms = mod, transforms
        self.first = {
            str(name): transform
            for transform, func in transforms.items()
            if func.attrs is not None
            for name in func.attrs.get(TRANSFORMS) or ()
        }
        second = {n + TRANSFORM for n, t in self.first.items() if n + TRANSFORM != t}
        self.starts = {n: transforms[n] for n in sorted(transforms) if n not in second}
        types = self._types()
        self.symbols = {s: tirx.Var(str(s.name), s.ty.dtype) for s in _symbols(types)}
        self.values = Values(mod, self._weights(types), any_call=True)
        self.results: list[Any] = []

    def functions(self) -> list[str]:
        """The functions that take weights, in alphabetical order."""
        return sorted(
            name.name_hint
            for name, func in self.mod.functions_items()
            if isinstance(func, relax.Function)
            and name.name_hint not in self.transforms
            and func.attrs is not None
            and "num_input" in func.attrs
            and int(func.attrs["num_input"]) < len(func.params)
        )

    def places(self, name: str) -> list[int] | None:
        """Where a function's weights are among the results; None if it takes other weights."""
        first, second = self.first.get(name), name + TRANSFORM
        given: list[Any] = list(self.values.weights)
        if first is not None:
            given = self._after(first, given)
        if second in self.transforms and second != first:
            given = self._after(second, given)
        func = self.mod[name]
        taken = func.params[int(func.attrs["num_input"]) :]
        if len(taken) != len(given):
            return None
        return [self._place(expr) for expr in given]

    def function(self, names: Sequence[str]) -> Any:
        """The merged transform."""
        values = self.values
        params = Var("params", relax.TupleType([type_of(w) for w in values.weights]))
        builder = relax.BlockBuilder()
        make = values.writer(builder, params)
        with builder.function(SHARED, [params], attrs={TRANSFORMS: list(names)}):
            with builder.dataflow():
                # A result after the other, so that what lies between is freed early.
                fields = [make(x) if isinstance(x, Var) else x for x in self.results]
                output = builder.emit_output(relax.Tuple(fields), "output")
            builder.emit_func_output(output)
        return copy_with_new_vars(builder.get()[SHARED])

    def _types(self) -> list[Any]:
        """The types of the weights that all start from."""
        (name, first), *others = self.starts.items()
        types = list(type_of(first.params[0]).fields)
        for other, func in others:
            if not _equal(types, list(type_of(func.params[0]).fields)):
                raise SharedWeightsError(f"{name!r} and {other!r} take different weights")
        return types

    def _weights(self, types: Sequence[Any]) -> list[Any]:
        names = self._names()
        params = [Var(names.get(n, f"weight_{n}"), ty) for n, ty in enumerate(types)]
        func = relax.Function(params, relax.Tuple(params), relax.TupleType(types))
        return list(func.bind_symbolic_vars(self.symbols).params if self.symbols else params)

    def _names(self) -> dict[int, str]:
        """What the first transforms call the weights."""
        found: dict[int, str] = {}
        for func in self.starts.values():
            for binding in bindings(func):
                value = binding.value
                if isinstance(value, relax.TupleGetItem) and value.tuple_value.same_as(
                    func.params[0]
                ):
                    found.setdefault(int(value.index), str(binding.var.name))
        return found

    def _after(self, transform: str, given: list[Any]) -> list[Any]:
        """What a transform makes of these weights."""
        func = self.transforms[transform]
        own = _symbols(list(type_of(func.params[0]).fields))
        if own:
            func = func.bind_symbolic_vars(self._match(func, given))
        env = {func.params[0]: relax.Tuple(given)}
        env = self.values.read(transform, func, env)
        made = self.values.renamed(result_of(func), env)
        if not isinstance(made, relax.Tuple):
            raise SharedWeightsError(f"{transform!r} cannot be merged with others")
        return list(made.fields)

    def _match(self, func: Any, given: Sequence[Any]) -> dict[Any, Any]:
        """A transform's symbols, and what they are of the weights that it is given."""
        found: dict[Any, Any] = {}
        for ty, expr in zip(type_of(func.params[0]).fields, given, strict=True):
            theirs = expr.values if isinstance(expr, relax.ShapeExpr) else _sizes(type_of(expr))
            for size, known in zip(_sizes(ty), theirs, strict=True):
                if isinstance(size, tirx.Var):
                    found.setdefault(size, known)
        return found

    def _place(self, expr: Any) -> int:
        for n, other in enumerate(self.results):
            if tvm_ffi.structural_equal(expr, other):
                return n
        self.results.append(expr)
        return len(self.results) - 1


def _sizes(ty: Any) -> list[Any]:
    shape = getattr(ty, "shape", None)
    values = getattr(ty if shape is None else shape, "values", None)
    return list(values or ())


def _symbols(types: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(s for ty in types for s in relax.analysis.tir_vars_in_type(ty)))


def _equal(types: Sequence[Any], others: Sequence[Any]) -> bool:
    a, b = relax.TupleType(list(types)), relax.TupleType(list(others))
    return bool(tvm_ffi.structural_equal(a, b, map_free_vars=True))
