"""An export as a library and what has to be known to call it, ready to be saved."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree

from fx2relax import deploy, pipeline
from fx2relax._version import __version__
from fx2relax.compat import TupleType, tvm
from fx2relax.deploy.structure import At, Constant, Node
from fx2relax.errors import BuildFailure
from fx2relax.exporting.sizes import shape_text
from fx2relax.pipeline.functions import with_own_effects
from fx2relax.pipeline.target import described

if TYPE_CHECKING:
    from fx2relax.exporting.exported import Exported, Function
    from fx2relax.exporting.params import Params

_TRANSFORM = "transform_params"


@dataclass
class Built:
    """Compiled functions over one set of weights.

    Attributes:
        library: the bytes of a shared library, or object files where there is no linker for the
            target.
        manifest: what has to be known to call it.
        params: the weights.
    """

    library: bytes | deploy.Objects
    manifest: deploy.Manifest
    params: Params

    def save(self, folder: str | os.PathLike[str], *, weights: bool = True) -> None:
        """Write a folder that `fx2relax.load` loads where there is no PyTorch.

        Weights are written one after the other, so that those of a model on the meta device, bound
        to safetensors files, are never in memory together.

        Args:
            folder: where; an empty folder or an artifact there is replaced at the end, and is as
                it was if anything fails.
            weights: False leaves them out; they are given when the folder is loaded.

        Raises:
            WeightError: (a ValueError) weights without data; lists them.
            ArtifactError: the folder holds something else.
        """
        if weights:
            self.params.check_bound()
        given = self._weights() if weights else None
        if given is not None and not all(
            isinstance(size, int) for p in self.params.values() for size in p.shape
        ):
            given = dict(given)  # the file begins with their sizes
        deploy.save(folder, self.library, given, self.manifest)

    def _weights(self) -> Any:
        begun = {s.name for s in self.manifest.states if s.zeros}
        for param in self.params.values():
            if param.name not in begun:
                assert param.data is not None
                yield param.name, param.data.contiguous()


def build(exported: Exported, target: Any) -> Built:
    """Compile an export; see `Exported.build`."""
    mod = _with_own_effects(exported)
    try:
        lowered = pipeline.lower(mod, target=target, library="none", lift_weights=True)
        lowered, places = pipeline.merge_transforms(lowered)
        code = pipeline.portable_code(lowered, target=target)
    except Exception as error:
        raise BuildFailure(f"the export could not be compiled: {error}") from error
    library = code if isinstance(code, bytes) else deploy.Objects(code.objects, code.link)
    settings, features = described(target)
    params = exported.params
    frozen = [p for p in params.values() if p.kind != "state"]
    manifest = deploy.Manifest(
        functions=tuple(
            _function(mod[f.name], f, _weights_of(lowered[f.name], frozen, places), places)
            for f in exported.functions.values()
        ),
        weights=tuple(deploy.Weight(p.name, p.shape, p.dtype) for p in frozen),
        states=tuple(_state(p) for p in params.values() if p.kind == "state"),
        sizes=tuple(
            deploy.Size(name, d.min, d.max, d.multiple_of) for name, d in exported.sizes.items()
        ),
        target=settings,
        tvm=tvm.__version__,
        fx2relax=__version__,
        torch=torch.__version__,
        cpu_features=features,
    )
    return Built(library, manifest, params)


def _weights_of(lowered: Any, frozen: list[Any], places: Mapping[str, list[int]]) -> list[str]:
    """The weights that a compiled function, or its transform, takes."""
    taken = lowered.attrs["global_symbol"] in places
    own = len(lowered.params) - int(lowered.attrs["num_input"])
    return [p.name for p in frozen] if taken or own else []


def _state(param: Any) -> deploy.State:
    data = param.data
    zeros = data is not None and not bool(data.count_nonzero())
    return deploy.State(param.name, param.shape, param.dtype, zeros)


def _with_own_effects(exported: Exported) -> Any:
    """The module, in which whoever calls a function knows nothing of its effects."""
    printing = [f.name for f in exported.functions.values() if f.io]
    if not printing:
        return exported.mod
    mod = exported.mod.clone()
    del mod["_initialize_effect"]
    for name in printing:
        mod[name] = with_own_effects(mod[name])
    return mod


def _function(
    relaxed: Any, function: Function, weights: list[str], places: Mapping[str, list[int]]
) -> deploy.Function:
    inputs = list(relaxed.params)[: int(relaxed.attrs["num_input"])]
    parameters = []
    for spec, param in zip(function.inputs, inputs, strict=False):
        parameters.append(_parameter(spec, param.ty))
    if function.sizes:
        parameters.append(deploy.Parameter("sizes", "size", shape_text(inputs[-1].ty)))
    users = [i for i, spec in enumerate(function.inputs) if spec.kind == "user"]
    leaves = iter(sorted(users, key=lambda i: function.inputs[i].position))
    called = function.called
    nodes = [
        _Leaf(Constant(called.static[i]) if i in called.static else At(next(leaves)))
        for i in range(called.spec.num_leaves)
    ]
    arguments = pytree.tree_unflatten(nodes, called.spec)
    taken = places.get(function.name)
    return deploy.Function(
        name=function.name,
        parameters=tuple(parameters),
        arguments=tuple(
            (name, _structure(function, value))
            for name, value in zip(called.names, arguments, strict=True)
        ),
        results=tuple(_results(function, relaxed.ret_ty)),
        output=_structure(function, _output(function)),
        weights=tuple(weights),
        transform=_TRANSFORM if taken is not None else "",
        takes=tuple(taken) if taken is not None else None,
    )


@dataclass(frozen=True)
class _Leaf:
    node: Node


def _structure(function: Function, value: Any) -> Node:
    try:
        return deploy.structure.of(value, lambda v: v.node if isinstance(v, _Leaf) else None)
    except TypeError as error:
        raise BuildFailure(
            f"{function.name} takes or returns what an artifact cannot hold: {error}"
        ) from None


def _parameter(spec: Any, ty: Any) -> deploy.Parameter:
    if spec.kind == "state":
        return deploy.Parameter(spec.name, "state")
    if not isinstance(spec.val, torch.Tensor):
        return deploy.Parameter(spec.relax_name, "size", shape_text(ty))
    if spec.val.is_complex():
        raise BuildFailure(f"the argument {spec.name!r} is complex: give its parts instead")
    return deploy.Parameter(spec.relax_name, "tensor", shape_text(ty), str(ty.dtype))


def _results(function: Function, ty: Any) -> list[deploy.Result]:
    """What the Relax function returns: its own results, then new values of what it writes to."""
    types = list(ty.fields) if isinstance(ty, TupleType) else [ty]
    captured = function.captured
    own = [s for s in function.outputs if s.kind != "value"]
    written = captured.mutations
    found = []
    if function.io:
        *types, _ = types
    for index, kind in enumerate(types):
        shape = shape_text(kind)
        if not hasattr(kind, "dtype"):
            found.append(deploy.Result("size"))
            continue
        argument, state = None, None
        place = index - (len(own) - len(written))
        if place >= 0:
            position = written[place]
            target = next(i for i, spec in enumerate(function.inputs) if spec.position == position)
            if function.inputs[target].kind == "state":
                state = function.inputs[target].name
            else:
                argument = target
        found.append(deploy.Result("tensor", shape, str(kind.dtype), argument, state))
    return [*found, *([deploy.Result("object")] if function.io else [])]


def _output(function: Function) -> Any:
    """What the Python function returns, with leaves for the Relax function's results."""
    captured = function.captured
    values: list[Any] = []
    for spec in function.outputs[: captured.num_outputs]:
        if spec.pairs:
            raise BuildFailure(f"{function.name} returns a complex tensor: return its parts")
        values.append(spec.value if spec.kind == "value" else _Leaf(At(spec.index)))
    return captured.unflatten(values)
