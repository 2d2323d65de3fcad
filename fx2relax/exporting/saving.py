"""An export as a saved artifact: compiled, described and written."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree

from fx2relax import _version, deploy, pipeline
from fx2relax.capture import Captured
from fx2relax.compat import is_prim_expr, relax, tirx, tvm
from fx2relax.deploy import Manifest, Parameter, Result, Size, State, Weight, structure
from fx2relax.deploy.sizes import parse
from fx2relax.deploy.structure import At, Constant, Node
from fx2relax.errors import WeightError
from fx2relax.exporting.functions import Exported, Function
from fx2relax.pipeline.target import described

_SIGNS = {
    tirx.Add: "({} + {})",
    tirx.Sub: "({} - {})",
    tirx.Mul: "({} * {})",
    tirx.FloorDiv: "({} // {})",
    tirx.FloorMod: "({} % {})",
    tirx.Min: "min({}, {})",
    tirx.Max: "max({}, {})",
}


def save(
    exported: Exported,
    folder: str | os.PathLike[str],
    *,
    target: Any = None,
    lift_weights: bool = True,
) -> Manifest:
    """Compile an export and write it as an artifact, which `fx2relax.load` loads.

    Args:
        exported: the export. Weights without data are left out of the artifact if all of them
            have none; it is then given them when it is loaded.
        folder: see `deploy.save`.
        target: a TVM target, its dict or its name; this machine when left out. Where there is no
            linker for it, the artifact holds object files for `deploy.link`.
        lift_weights: whether work on weights alone is done once, when a function is first called.

    Returns:
        what the artifact says of itself.

    Raises:
        ArtifactError: see `deploy.save`.
        WeightError: (a ValueError) some weights have no data; names them.
        TypeError: a function takes or returns something that has no tensors, numbers, tuples,
            lists and dicts alone in it.
    """
    params = exported.params.values()
    unbound = exported.params.unbound
    if unbound and len(unbound) < len(exported.params):
        raise WeightError(f"weights without data: {', '.join(unbound)}")
    functions = {n: _function(exported, n, f) for n, f in exported.functions.items()}
    lowered = pipeline.lower(exported.mod, target=target, library="none", lift_weights=lift_weights)
    code = pipeline.portable_code(lowered, target=target)
    known = {str(name.name_hint) for name, _ in lowered.functions_items()}
    settings, features = described(target)
    sizes = [Size(d.name, d.min, d.max, d.multiple_of) for d in exported.sizes.values()]
    manifest = Manifest(
        functions=tuple(_with_transform(f, known) for f in functions.values()),
        weights=tuple(Weight(p.name, p.shape, p.dtype) for p in params if p.kind != "state"),
        states=tuple(
            State(p.name, tuple(map(int, p.shape)), p.dtype, zeros=_is_zero(p.data))
            for p in params
            if p.kind == "state"
        ),
        sizes=(*sizes, *_others(functions, set(exported.sizes))),
        target=settings,
        cpu_features=features,
        tvm=tvm.__version__,
        fx2relax=_version.__version__,
        torch=torch.__version__,
    )
    zeros = {state.name for state in manifest.states if state.zeros}
    bound = {p.name: p.data for p in params if p.name not in zeros}
    library = code if isinstance(code, bytes) else deploy.Objects(code.objects, code.link)
    return deploy.save(folder, library, None if unbound else bound, manifest)


def _is_zero(data: torch.Tensor | None) -> bool:
    return data is not None and not bool(data.any())


def _with_transform(function: deploy.Function, known: set[str]) -> deploy.Function:
    name = f"{function.name}_transform_params"
    return dataclasses.replace(function, transform=name) if name in known else function


def _function(exported: Exported, name: str, function: Function) -> deploy.Function:
    """What the artifact says of one function."""
    made = exported.mod[name]
    count = int(made.attrs["num_input"])
    kinds = [spec.kind for spec in function.inputs]
    kinds += ["sizes"] * (count - len(kinds))
    parameters = tuple(
        Parameter(str(p.name), "state") if kind == "state" else _parameter(p)
        for p, kind in zip(made.params[:count], kinds, strict=True)
    )
    places = {spec.position: index for index, spec in enumerate(function.inputs)}
    captured = function.captured
    results, output = _results(captured, made.ret_ty, places)
    return deploy.Function(
        name=name,
        parameters=parameters,
        arguments=_arguments(function, captured, places),
        results=results,
        output=output,
        weights=tuple(str(p.name) for p in made.params[count:]),
    )


def _parameter(param: Any) -> Parameter:
    kind = param.ty
    if isinstance(kind, relax.ShapeType):
        return Parameter(str(param.name), "size", tuple(map(_text, kind.values)))
    return Parameter(str(param.name), "tensor", *_tensor(kind))


def _tensor(kind: Any) -> tuple[tuple[int | str, ...], str]:
    return tuple(map(_text, kind.shape.values)), str(kind.dtype)


def _arguments(
    function: Function, captured: Captured, places: Mapping[int, int]
) -> tuple[tuple[str, Node], ...]:
    """The caller's arguments, by name, as they are nested."""
    users = [n for n, given in enumerate(captured.inputs) if given.kind == "user"]
    if captured.in_spec is None:  # a program of `torch.export`: flat
        return tuple((captured.inputs[n].name, At(places[n])) for n in users)
    given = iter(users)
    leaves = [
        Constant(captured.static[n]) if n in captured.static else At(places[next(given)])
        for n in range(captured.in_spec.num_leaves)
    ]
    values = pytree.tree_unflatten(leaves, captured.in_spec)
    return tuple(
        (name, structure.of(value, _leaf))
        for name, value in zip(function.arguments, values, strict=True)
    )


def _results(
    captured: Captured, kind: Any, places: Mapping[int, int]
) -> tuple[tuple[Result, ...], Node]:
    """What the Relax function returns, and how the caller gets it."""
    fields = list(kind.fields) if isinstance(kind, relax.TupleType) else [kind]
    own = captured.num_outputs
    results = [_result(field) for field in fields[:own]]
    for position, field in zip(captured.mutations, fields[own:], strict=True):
        source = captured.inputs[position]
        shape, dtype = _tensor(field)
        if source.kind == "user":
            results.append(Result("tensor", shape, dtype, argument=places[position]))
        else:
            results.append(Result("tensor", shape, dtype, state=source.name))
    output = structure.of(captured.unflatten([At(n) for n in range(own)]), _leaf)
    return tuple(results), output


def _result(kind: Any) -> Result:
    if isinstance(kind, relax.ShapeType):
        return Result("size", tuple(map(_text, kind.values or ())))
    return Result("tensor", *_tensor(kind))


def _leaf(value: Any) -> Node | None:
    return value if isinstance(value, (At, Constant)) else None


def _text(size: Any) -> int | str:
    """A size as a manifest spells it."""
    if isinstance(size, int):
        return size
    if isinstance(size, tirx.IntImm):
        return int(size.value)
    if isinstance(size, tirx.Cast):
        return _text(size.value)
    if isinstance(size, tirx.Var):
        return str(size.name)
    sign = _SIGNS.get(type(size))
    if sign is None or not is_prim_expr(size):
        raise TypeError(f"a size that an artifact cannot spell: {size}")
    return sign.format(_text(size.a), _text(size.b))


def _others(functions: Mapping[str, deploy.Function], known: set[str]) -> list[Size]:
    """Sizes that are known only after a call: they depend on data."""
    shapes = [p.shape for f in functions.values() for p in f.parameters]
    shapes += [r.shape for f in functions.values() for r in f.results]
    names = {name for shape in shapes for size in shape for name in parse(size).names}
    return [Size(name) for name in sorted(names - known)]
