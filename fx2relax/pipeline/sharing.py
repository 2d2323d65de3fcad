"""One transform of the weights for several functions of a module.

The functions of an export (``prefill`` and ``decode``) take one list of weights. What all of them
compute from weights alone moves into one function, ``transform_params``: one tuple of weights in,
one tuple out. It is called once, and each function takes what it returned in place of the weights.

TVM's `LiftTransformParams` does the same, but counts bindings, and so finds nothing where one
function writes an expression twice; gives up where a function holds any `match_cast`; looks at
dataflow blocks alone; and says nothing of what it left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax
from tvm.relax.utils import copy_with_new_vars

from ..compat import Var, type_of
from .alike import SharedWeightsError, taking_weights, uncalled
from .choosing import Chosen
from .lift import SHARED, TRANSFORM, TRANSFORMS
from .lifted import Shared


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
        SharedWeightsError: (a ValueError) see `share_transforms`.
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
        functions: the names of those to look at; all with weights when left out or empty. The
            others stay as they are.

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
    uncalled(mod, names)
    found = Chosen(mod, names)
    kept, lifted = found.kept(), found.lifted()
    if not found.lifts:
        return Shared(mod, lifted, kept, {})
    mod = mod.clone()
    sizes = _sizes(found)
    changed = {name: _function(found, name, sizes) for name in names}
    for name, function in changed.items():
        del mod[name]
        mod[name] = copy_with_new_vars(function)
    mod[transform] = copy_with_new_vars(_transform(found, transform, sizes))
    return Shared(mod, lifted, kept, dict.fromkeys(names, transform))


def _sizes(chosen: Chosen) -> list[Any]:
    """The symbols that some function needs and can find nowhere."""
    missing: set[Any] = set()
    for name in chosen.names:
        missing.update(relax.analysis.free_symbolic_vars(_function(chosen, name, [])))
    weights = chosen.values.weights
    order = [s for w in weights for s in relax.analysis.tir_vars_in_type(type_of(w))]
    return [s for s in dict.fromkeys(order) if s in missing]


def _function(chosen: Chosen, name: str, sizes: list[Any]) -> Any:
    """One of the functions over the new list of weights."""
    func, env = chosen.functions[name], chosen.known[name]
    leading = int(func.attrs["num_input"])
    survivors = [func.params[leading + n] for n in chosen.survivors]
    names = chosen.new_names()[len(survivors) :]
    results = [Var(n, value.ty) for n, value in zip(names, chosen.outputs, strict=True)]
    given = {value.var: var for value, var in zip(chosen.outputs, results, strict=True)}
    inside = {value.var for value in chosen.lifts}
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
    made = made.without_attr("params")  # weights that were bound to the old list
    made = relax.transform.CanonicalizeBindings()(tvm.IRModule({"main": made}))["main"]
    return relax.analysis.remove_all_unused(made)


def _transform(chosen: Chosen, name: str, sizes: list[Any]) -> Any:
    """The function that makes the new list of weights."""
    weights = chosen.values.weights
    params = Var("params", relax.TupleType([type_of(w) for w in weights]))
    builder = relax.BlockBuilder()
    names = chosen.new_names()[len(chosen.survivors) :]
    called = {v.var: n for v, n in zip(chosen.outputs, names, strict=True)}
    make = chosen.values.writer(builder, params, called)
    attrs = {"num_input": 0, TRANSFORMS: chosen.names}
    with builder.function(name, [params], attrs=attrs):
        with builder.dataflow():
            results = [make(value.var) for value in chosen.outputs]
            fields = [make(weights[n]) for n in chosen.survivors] + results
            shapes = [relax.ShapeExpr(sizes)] if sizes else []
            output = builder.emit_output(relax.Tuple([*shapes, *fields]), "output")
        builder.emit_func_output(output)
    return builder.get()[name]
