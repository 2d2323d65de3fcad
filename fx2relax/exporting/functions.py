"""`export`: functions of a model as one Relax module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._dynamo.convert_frame import compile_lock
from torch.utils._python_dispatch import _disable_current_modes

from fx2relax import decompositions, registry
from fx2relax.capture import capture
from fx2relax.capture_inputs import fixed_sizes, is_pair
from fx2relax.capture_method import Called, capture_method
from fx2relax.capture_source import named_weights
from fx2relax.errors import ImportFailure
from fx2relax.exporting.exported import Exported, assembled
from fx2relax.exporting.sizes import Sizes
from fx2relax.printing import kept_prints
from fx2relax.spec import Dim

Spec = Mapping[str, Any]
Converters = Mapping[Any, Callable[..., Any]]


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
        return assembled(
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
        return assembled({name: (captured, called)}, sizes, set(), order, set())


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
