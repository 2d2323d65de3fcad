"""Functions that take the same list of weights: which they are, and that they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import relax, tirx

from ..compat import TensorType, Var, shape_values, type_of
from ..errors import Fx2RelaxError
from .lift import TRANSFORMS


class SharedWeightsError(Fx2RelaxError, ValueError):
    """Functions that cannot share one transform of their weights."""


def taking_weights(mod: Any, functions: Sequence[str] | None) -> list[str]:
    """The names of functions with weights, in alphabetical order.

    Args:
        mod: the module.
        functions: names, of which each must be a function's with ``num_input``; all with weights
            when left out.
    """
    known = {
        name.name_hint: func
        for name, func in mod.functions_items()
        if isinstance(func, relax.Function)
        and func.attrs is not None
        and "num_input" in func.attrs
        and TRANSFORMS not in func.attrs
    }
    if functions is None:
        return sorted(n for n, f in known.items() if int(f.attrs["num_input"]) < len(f.params))
    if isinstance(functions, str):
        raise SharedWeightsError(f"functions must be a list of names, not the name {functions!r}")
    unknown = [name for name in functions if name not in known]
    if unknown:
        raise SharedWeightsError(
            f"no function with num_input is called {', '.join(map(repr, unknown))}; "
            f"there is {', '.join(map(repr, sorted(known))) or 'none'}"
        )
    return sorted(set(functions))


def alike(mod: Any, names: Sequence[str]) -> tuple[dict[str, Any], list[Any]]:
    """Functions whose weights have the same symbols, and a variable for each weight.

    Args:
        mod: the module.
        names: the functions', the first of which names the weights.

    Raises:
        SharedWeightsError: their weights differ.
    """
    functions: dict[str, Any] = {}
    weights: list[Any] = []
    wrong: list[str] = []  # names every culprit
    first = names[0]
    for name in names:
        func = relax.analysis.remove_all_unused(mod[name])
        own = _weights(func)
        if not functions:
            fresh = {s: tirx.Var(str(s.name), s.ty.dtype) for s in _symbols(own)}
            func = func.bind_symbolic_vars(fresh) if fresh else func
            weights = [Var(w.name, type_of(w)) for w in _weights(func)]
        else:
            wrong += _differences(first, weights, name, own)
            if not wrong:
                same = {a: b for a, b in _paired(own, weights) if not a.same_as(b)}
                func = func.bind_symbolic_vars(same) if same else func
                wrong += _unequal(first, weights, name, _weights(func))
        functions[name] = func
    if wrong:
        lines = "\n  ".join(wrong)
        raise SharedWeightsError(
            f"functions that share a transform must take the same weights\n  {lines}"
        )
    return functions, weights


def _weights(func: Any) -> list[Any]:
    return list(func.params[int(func.attrs["num_input"]) :])


def _symbols(weights: Sequence[Any]) -> list[Any]:
    return list(
        dict.fromkeys(s for w in weights for s in relax.analysis.tir_vars_in_type(type_of(w)))
    )


def uncalled(mod: Any, names: Sequence[str]) -> None:
    """Raise SharedWeightsError if a function calls one of these."""
    for caller, func in mod.functions_items():
        if not isinstance(func, relax.Function):
            continue
        called = {g.name_hint for g in relax.analysis.all_global_vars(func)} & set(names)
        called -= {caller.name_hint}
        if called:
            raise SharedWeightsError(
                f"{caller.name_hint!r} calls {', '.join(map(repr, sorted(called)))}, whose "
                "weights cannot be lifted then"
            )


def _differences(first: str, weights: Sequence[Any], name: str, own: Sequence[Any]) -> list[str]:
    """What is wrong with the weights of a second function, a line each."""
    if len(weights) != len(own):
        mine, yours = {w.name for w in weights}, {w.name for w in own}
        only = [f"{w.name!r} only in {first}" for w in weights if w.name not in yours]
        only += [f"{w.name!r} only in {name}" for w in own if w.name not in mine]
        numbers = f"number: {first} takes {len(weights)}, {name} takes {len(own)}"
        return [f"{numbers} ({', '.join(only)})" if only else numbers]
    lines = []
    back: dict[Any, Any] = {}
    there: dict[Any, Any] = {}
    for n, (weight, other) in enumerate(zip(weights, own, strict=True)):
        if weight.name != other.name:
            lines.append(
                f"name: weight {n} is {weight.name!r} in {first}, {other.name!r} in {name}"
            )
            continue
        kind = _difference(type_of(weight), type_of(other), there, back)
        if kind:
            pair = f"{_shown(weight)} in {first}, {_shown(other)} in {name}"
            lines.append(f"{kind}: {weight.name!r} is {pair}")
    return lines


def _unequal(first: str, weights: Sequence[Any], name: str, own: Sequence[Any]) -> list[str]:
    """The weights whose sizes are other expressions of the same symbols, a line each."""
    return [
        f"shape: {w.name!r} is {_shown(w)} in {first}, {_shown(o)} in {name}"
        for w, o in zip(weights, own, strict=True)
        if not tvm_ffi.structural_equal(type_of(w), type_of(o))
    ]


def _difference(a: Any, b: Any, there: dict[Any, Any], back: dict[Any, Any]) -> str:
    """In what two types differ; empty if only the names of their symbols do."""
    if not isinstance(a, TensorType) or not isinstance(b, TensorType):
        return "" if tvm_ffi.structural_equal(a, b, map_free_vars=True) else "type"
    if str(a.dtype) != str(b.dtype):
        return "dtype"
    mine, yours = shape_values(a), shape_values(b)
    if mine is None or yours is None:
        return "" if mine is yours and a.ndim == b.ndim else "shape"
    if len(mine) != len(yours):
        return "shape"
    for size, other in zip(mine, yours, strict=True):
        if isinstance(size, tirx.Var) and isinstance(other, tirx.Var):
            if not there.setdefault(other, size).same_as(size):
                return "shape"
            if not back.setdefault(size, other).same_as(other):
                return "shape"
        elif isinstance(size, int) or isinstance(other, int):
            if not (isinstance(size, int) and isinstance(other, int) and size == other):
                return "shape"
        elif not tvm_ffi.structural_equal(size, other, map_free_vars=True):
            return "shape"
    return ""


def _paired(own: Sequence[Any], weights: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The symbols of one function's weights with those of another's."""
    pairs = []
    for other, weight in zip(own, weights, strict=True):
        mine, yours = _symbols([other]), _symbols([weight])
        pairs += list(zip(mine, yours, strict=True))
    return pairs


def _shown(weight: Any) -> str:
    ty = type_of(weight)
    if not isinstance(ty, TensorType):
        return str(ty)
    sizes = shape_values(ty)
    shape = f"{ty.ndim}-d" if sizes is None else "(" + ", ".join(map(str, sizes)) + ")"
    return f"{shape} {ty.dtype}"
