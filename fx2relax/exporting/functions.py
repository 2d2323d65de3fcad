"""`export`: functions of a model as one Relax module."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._dynamo.convert_frame import compile_lock
from torch.utils._python_dispatch import _disable_current_modes

from fx2relax import decompositions, dtypes, registry
from fx2relax.capture import Captured, capture
from fx2relax.capture_inputs import fixed_sizes, is_pair
from fx2relax.capture_method import Called, capture_method
from fx2relax.capture_source import named_weights
from fx2relax.compat import relax
from fx2relax.errors import ImportFailure, MissingOp, UnsupportedOpError, WeightError
from fx2relax.exporting.artifact import Built, build
from fx2relax.exporting.params import Param, Params
from fx2relax.exporting.sizes import Sizes, shape_text
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
from fx2relax.printing import kept_prints
from fx2relax.spec import Dim

Spec = Mapping[str, Any]
Converters = Mapping[Any, Callable[..., Any]]


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


def export(
    model: torch.nn.Module,
    functions: Mapping[str, Spec | tuple[Callable[..., Any], Spec]],
    *,
    weights: Mapping[str, Any] | None = None,
    debug: bool = False,
    call_function_map: Converters | None = None,
    call_module_map: Converters | None = None,
) -> Exported:
    """Export functions of a model as one Relax module over one set of weights.

    Args:
        model: any module; it is traced as it is (call ``eval()`` first for inference) and not
            changed. Weights on the meta device are exported without data.
        functions: by name, the spec of the method of that name, or a function that uses the
            model and its spec. A spec has an entry for each parameter: a tensor (its shape and
            dtype are fixed), `Tensor`, a ``(shape, dtype)`` pair, a name or `Dim` for a
            parameter that is a size, a Python number or None, which is built in, or lists,
            tuples, dicts and other structures of these.
        weights: the shapes of weights that have symbolic sizes, by name:
            ``{"fc.weight": ("n", 4), "fc.bias": ("n",)}``. Their data are unbound.
        debug: whether calls of `print` become a part of the functions, which print where they
            run. Each then takes an object ``_io`` as its last input, and returns it beside its
            results; ``_initialize_effect`` gives the first one. A saved export needs neither.
        call_function_map: see `from_fx`.
        call_module_map: see `from_fx`.

    Returns:
        an `Exported`.

    Raises:
        UnsupportedOpError: operators without a route, of all functions.
        ImportFailure: a function does not run on its spec, or works for some values of a size
            only; the message says which, and where.
        ValueError: a spec that does not fit its function, or sizes that contradict each other.
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"export takes a torch.nn.Module, not {type(model).__name__}")
    if not functions:
        raise ValueError("there is no function to export")
    shapes, known = dict(weights or {}), named_weights(model)
    _check_shapes(known, shapes)
    chosen = {name: _chosen(model, name, entry) for name, entry in functions.items()}
    specs = [spec for _, spec in chosen.values()]
    # A shape is no leaf of its own; with a dtype it is one.
    sizes = Sizes([specs, [(tuple(shape), "float32") for shape in shapes.values()]])
    maps = {**(call_function_map or {}), **(call_module_map or {})}
    make = sizes.maker(fixed_sizes(model, pytree.tree_leaves(specs, is_leaf=is_pair)))
    captures = {}
    with compile_lock, registry.overrides(maps), _disable_current_modes():
        for name, (function, spec) in chosen.items():
            try:
                with kept_prints() if debug else contextlib.nullcontext():
                    captures[name] = capture_method(
                        model,
                        function,
                        spec,
                        make,
                        shapes=shapes,
                        decompositions=decompositions.asking_table(halves=False),
                        converters=registry.kept_whole(),
                    )
            except (ImportFailure, ValueError) as error:
                raise type(error)(f"{name}: {error}") from error
        return _assembled(
            captures, sizes.known, set(shapes), list(known), _aliases(model, list(known)), debug
        )


def from_exported_program(program: torch.export.ExportedProgram, name: str = "main") -> Exported:
    """Take over what `torch.export` exported.

    Args:
        program: the program.
        name: what the function is to be called.

    Returns:
        an `Exported` with one function; the program's range constraints are its sizes' bounds.

    Raises:
        UnsupportedOpError: operators without a route.
        ImportFailure: a converter disagrees with PyTorch.
    """
    with _disable_current_modes():
        captured = capture(
            program,
            decompositions=decompositions.asking_table(halves=False),
            converters=registry.kept_whole(),
        )
        sizes = {}
        for symbol, bounds in program.range_constraints.items():
            if symbol.is_Symbol:
                most = int(bounds.upper) if bounds.upper.is_Integer else None
                sizes[str(symbol)] = Dim(str(symbol), max(int(bounds.lower), 0), most)
        names = [i.name for i in captured.inputs if i.kind == "user"]
        called = Called(names, pytree.tree_structure(names), {})
        weights = [i.name for i in captured.inputs if i.kind in ("parameter", "buffer")]
        order = list(dict.fromkeys([*weights, *program.state_dict]))
        return _assembled({name: (captured, called)}, sizes, set(), order, set())


def _assembled(
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


def _chosen(
    model: torch.nn.Module, name: str, entry: Any
) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """The function that an entry of `export` means, and its spec."""
    if not name.isidentifier():
        raise ValueError(f"the name of a function is an identifier, not {name!r}")
    if isinstance(entry, Mapping):
        function = getattr(model, name, None)
        if not callable(function):
            raise ValueError(f"{type(model).__name__} has no method {name!r}")
        return function, entry
    if isinstance(entry, tuple) and len(entry) == 2 and callable(entry[0]):
        return entry[0], entry[1]
    raise ValueError(f"{name}: give a spec, or a function and its spec, not {entry!r}")


def _aliases(model: torch.nn.Module, names: list[str]) -> set[str]:
    """Second names of tied weights."""
    every = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name for name, _ in every} - set(names)


def _check_shapes(
    weights: Mapping[str, tuple[str, torch.Tensor]], shapes: Mapping[str, Any]
) -> None:
    for name, shape in shapes.items():
        if name not in weights:
            raise ValueError(f"the model has no weight {name!r}")
        axes = weights[name][1].dim()
        if len(tuple(shape)) != axes:
            raise ValueError(f"the weight {name!r} has {axes} axes, not {shape}")
