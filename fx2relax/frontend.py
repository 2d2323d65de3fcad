"""`from_fx`: any FX graph as a Relax module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch._dynamo.convert_frame import compile_lock
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from fx2relax import decompositions, registry
from fx2relax.capture import Captured, capture
from fx2relax.compat import IRModule, from_torch, relax
from fx2relax.imported import Imported
from fx2relax.importer import import_graph
from fx2relax.runtime import boundary, torch_call

Converters = Mapping[Any, Callable[..., Any]]


def from_fx(
    graph_module: torch.fx.GraphModule | torch.export.ExportedProgram,
    inputs: Sequence[Any] | None = None,
    *,
    keep_params_as_input: bool = True,
    unwrap_unit_return_tuple: bool = False,
    call_function_map: Converters | None = None,
    call_module_map: Converters | None = None,
    names: Sequence[str] | None = None,
    on_unsupported: str = "raise",
) -> IRModule:
    """Import an FX graph as a Relax module with one function, ``main``.

    Args:
        graph_module: from `torch.fx.symbolic_trace`, Dynamo, `torch.export` (the program, or its
            ``.module()``) or AOTAutograd.
        inputs: one entry per input: a tensor, or a ``(shape, dtype)`` pair whose sizes are ints,
            names or `tirx.Var`. One name is one size everywhere; two `tirx.Var` are two sizes.
            A Python number or None is built in; lists, tuples and dicts nest. May be left out
            for a graph that carries its own example values.
        keep_params_as_input: weights are parameters of the function behind the attribute
            ``num_input``, in ``state_dict`` order under their own names, and travel in its
            attribute ``params`` (`tvm.relax.frontend.detach_params` takes them out). They share
            PyTorch's memory. False makes them constants.
        unwrap_unit_return_tuple: return the tensor where the graph returns a tuple of one.
        call_function_map: converters for Python functions, Tensor methods (by name) and ATen
            overloads, for this import only; see `converts`.
        call_module_map: the same for module classes; called as ``converter(module, *inputs)``.
        names: names for the inputs; the placeholders' own when left out.
        on_unsupported: ``"raise"`` lists all operators that have neither a converter nor a
            decomposition; ``"torch"`` makes them calls back into PyTorch, which work in this
            process only.

    Returns:
        a module whose function takes the inputs, then the weights, and returns what the graph
        returns (a tensor, or a flat tuple), followed by the new value of every input and buffer
        that the graph writes to. Python constants among the outputs are left out.

    Raises:
        UnsupportedOpError: operators without a route, with ``on_unsupported="raise"``.
        ImportFailure: the graph does not run on these inputs, fixes a size that was given as
            symbolic, or a converter disagrees with PyTorch.
    """
    if on_unsupported not in ("raise", "torch"):
        raise ValueError(f"on_unsupported={on_unsupported!r}; it takes 'raise' or 'torch'")
    maps = {**(call_function_map or {}), **(call_module_map or {})}
    # Programs of `torch.export` share the mode of their fake values with whoever traces them.
    with compile_lock, registry.overrides(maps), _disable_current_modes():
        captured = capture(
            graph_module,
            inputs,
            names=names,
            decompositions=decompositions.asking_table(halves=False),
            converters=registry.kept_whole(),
        )
        imported = import_graph(
            captured.gm,
            captured.specs(),
            symbols=captured.symbols,
            on_unsupported=on_unsupported,
            single=_single(captured, unwrap_unit_return_tuple),
        )
    torch_call.register(imported.torch_calls)
    return _with_weights(imported, keep_params_as_input)


def _single(captured: Captured, unwrap: bool) -> bool:
    """Whether the function returns a tensor rather than a tuple of one."""
    if captured.num_outputs != 1 or captured.mutations:
        return False
    return unwrap or captured.out_spec == pytree.tree_structure(0)


def _with_weights(imported: Imported, as_input: bool) -> IRModule:
    frozen = imported.params[imported.num_input :]
    values = [from_torch(boundary.argument(s, s.value)) for s in frozen]
    mod = relax.transform.DeadCodeElimination([imported.name])(imported.mod)
    if not frozen:
        return mod
    if as_input:
        mod[imported.name] = mod[imported.name].with_attr("params", values)
        return mod
    variables = list(mod[imported.name].params)[-len(frozen) :]
    bound = dict(zip(variables, values, strict=True))
    return relax.transform.BindParams(imported.name, bound)(mod)
