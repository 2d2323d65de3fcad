"""What `export` makes: functions over one set of weights, as one Relax module."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from fx2relax import dtypes
from fx2relax.capture import Captured
from fx2relax.capture_method import Called
from fx2relax.compat import relax
from fx2relax.errors import MissingOp, UnsupportedOpError, WeightError
from fx2relax.exporting.artifact import Built, build
from fx2relax.exporting.params import Param, Params
from fx2relax.exporting.sizes import shape_text
from fx2relax.importer import import_graph
from fx2relax.outputs import OutputSpec
from fx2relax.params import InputSpec
from fx2relax.pipeline import Shared, lift_weights
from fx2relax.pipeline.functions import (
    UNNAMED,
    merged,
    stored_as,
    with_effects_begun,
    with_weights,
)
from fx2relax.spec import Dim


@dataclass
class Function:
    """One function of an export.

    Attributes:
        name: its name in the module.
        called: what the Python function takes.
        captured: what was traced.
        outputs: how what it returns is made of the Relax function's results.
        inputs: its Relax parameters that are not weights, in order.
        sizes: whether it takes one more, a shape of the sizes that no other shows.
        io: whether it takes one more, an object that stands for its effects, and returns it.
        states: the names of the buffers among the inputs.
    """

    name: str
    called: Called
    captured: Captured
    outputs: list[OutputSpec]
    inputs: list[InputSpec]
    sizes: bool
    io: bool = False

    @property
    def states(self) -> list[str]:
        return [spec.name for spec in self.inputs if spec.kind == "state"]


class Exported:
    """Functions of a model over one set of weights.

    Made by `export` and `from_exported_program`.

    Attributes:
        mod: the Relax module. Each function is public; its attribute ``num_input`` counts the
            parameters that are not weights, and behind them it takes every weight of `params`.
            A buffer that any function writes to stands left of them, and its new value follows
            what the function returns.
        params: the weights; bound to the model's own, unless those are on the meta device.
        functions: by name.
        sizes: what is known of the symbolic sizes, by name.
    """

    def __init__(
        self,
        mod: Any,
        params: Params,
        functions: Mapping[str, Function],
        sizes: Mapping[str, Dim],
    ) -> None:
        self.mod, self.params = mod, params
        self.functions, self.sizes = dict(functions), dict(sizes)
        #: What `lift` has moved; None before.
        self.lifted: Shared | None = None

    def show(self) -> None:
        """Print the module as TVMScript."""
        self.mod.show()

    def lift(self, shared: bool | Sequence[str] = True) -> Exported:
        """Move work on weights alone out of the functions, to be done once.

        Args:
            shared: True moves what all functions do into one function ``transform_params``, a list
                of names what the named ones do; False moves all that each function does into a
                ``<name>_transform_params`` of its own.

        Returns:
            another export over the same weights; its `lifted` says what was moved, and what was
            not and why.

        Raises:
            ValueError: there is no function of a name.
        """
        found = lift_weights(self.mod, shared)
        made = Exported(found.mod, self.params, self.functions, self.sizes)
        made.lifted = found
        return made

    def to(self, dtype: Any, *names: str) -> Exported:
        """Let weights be stored in another dtype than the functions compute with.

        Args:
            dtype: a floating-point dtype, as TVM, NumPy or PyTorch names it.
            names: of weights; all that are floating-point when left out.

        Returns:
            another export: its functions take those weights in `dtype` and cast them, once where
            `lift` or `build` follows. None of the weights is bound.

        Raises:
            WeightError: (a ValueError) a weight has data already, which would lose precision.
            KeyError: there is no weight of a name.
            ValueError: the functions no longer take these weights, after `lift`.
        """
        if self.lifted is not None:
            raise ValueError("call `to` before `lift`: the functions now take other weights")
        kind = dtypes.as_tvm(dtype)
        chosen = [self.params[n] for n in names] or [
            p for p in self.params.values() if p.kind != "state" and "float" in p.dtype
        ]
        bound = [p.name for p in chosen if p.bound]
        if bound:
            raise WeightError(f"unbind these weights first: {', '.join(bound[:20])}")
        changed = {p.name: kind for p in chosen}
        mod = self.mod.clone()
        for name in self.functions:
            mod[name] = stored_as(mod[name], changed)
        params = [replace(p, dtype=changed.get(p.name, p.dtype)) for p in self.params.values()]
        return Exported(mod, Params(params, self.params.unused), self.functions, self.sizes)

    def build(self, target: Any = None) -> Built:
        """Compile all functions, with generated kernels alone.

        Args:
            target: a TVM target, its dict or its name; this machine when left out.

        Returns:
            a library that can be saved, and its weights.

        Raises:
            BuildFailure: TVM cannot compile a function.
        """
        return build(self, target)

    def save(self, folder: str | os.PathLike[str], target: Any = None) -> None:
        """Compile all functions and write a folder that `load` takes: `build`, then `Built.save`.

        Args:
            folder: where; see `Built.save`.
            target: see `build`.

        Raises:
            BuildFailure: TVM cannot compile a function.
            WeightError: (a ValueError) weights without data; lists them.
            ArtifactError: the folder holds something else.
        """
        self.build(target).save(folder)

    def __repr__(self) -> str:
        names = ", ".join(self.functions)
        return f"<export of {names} over {len(self.params)} weights>"


def assembled(
    captures: Mapping[str, tuple[Captured, Called]],
    sizes: Mapping[str, Dim],
    unbound: set[str],
    order: list[str],
    aliases: set[str],
    debug: bool = False,
) -> Exported:
    """Import what was captured, over one list of weights."""
    written = {
        i.name
        for captured, _ in captures.values()
        for i in captured.inputs
        if i.mutated and i.kind != "user"
    }
    constants: list[InputSpec] = []
    modules: dict[str, Any] = {}
    functions: dict[str, Function] = {}
    used: dict[str, InputSpec] = {}
    missing: list[MissingOp] = []
    for name, (captured, called) in captures.items():
        specs = captured.specs()
        for spec in specs:
            if spec.kind == "constant":
                spec.name = _constant(spec, constants)
            elif spec.kind != "user" and spec.name in written:
                spec.kind = "state"
        try:
            imported = import_graph(
                captured.gm,
                specs,
                symbols=captured.symbols,
                name=UNNAMED,
                on_unsupported="raise",
                io=debug,
                single=captured.num_outputs == 1
                and not captured.mutations
                and captured.out_spec == pytree.tree_structure(0),
            )
        except UnsupportedOpError as error:
            missing += error.missing
            continue
        modules[name] = relax.transform.DeadCodeElimination([UNNAMED])(imported.mod)
        inputs = imported.params[: imported.num_input]
        functions[name] = Function(
            name, called, captured, imported.outputs, inputs, bool(imported.solved), debug
        )
        used |= {spec.name: spec for spec in imported.params if spec.kind != "user"}
    if missing:
        raise UnsupportedOpError(missing)
    frozen = [n for n in order if n in used and n not in written]
    frozen += [s.name for s in constants if s.name in used]
    types: dict[str, Any] = {}
    for module in modules.values():
        for param in module[UNNAMED].params:
            types.setdefault(str(param.name), param.ty)
    mod = merged(modules)
    for name, function in functions.items():
        count = len(function.inputs) + function.sizes + function.io
        made = with_weights(mod[name], count, frozen, types)
        mod[name] = _bounded(made, sizes)
    if debug:
        mod = with_effects_begun(mod)
    params = []
    for name in [*frozen, *[n for n in order if n in written]]:
        spec = used[name]
        shape = shape_text(types[name])
        data = None if spec.value is None or spec.value.is_meta else spec.value.detach()
        params.append(Param(name, shape, dtypes.to_tvm(spec.val.dtype), spec.kind, data))
        if name in unbound:
            params[-1].data = None
    unused = {n for n in order if n not in used} | aliases
    return Exported(mod, Params(params, unused), functions, sizes)


def _bounded(function: Any, sizes: Mapping[str, Dim]) -> Any:
    """The function with the bounds of its sizes, as TVM's memory planner reads them."""
    most = {name: dim.max for name, dim in sizes.items() if dim.max is not None}
    return function.with_attr("tir_var_upper_bound", most) if most else function


def _constant(spec: InputSpec, known: list[InputSpec]) -> str:
    """The name of a constant, one for all that are equal."""
    value = spec.value
    assert value is not None
    for other in known:
        same = other.value
        assert same is not None
        if same is value or (
            same.dtype == value.dtype and same.shape == value.shape and _equal(same, value)
        ):
            return other.name
    spec.name = f"constant_{len(known)}"
    known.append(spec)
    return spec.name


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    a, b = a.detach().contiguous(), b.detach().contiguous()
    return bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8))) if a.dim() else a is b
