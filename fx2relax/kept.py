"""Calls that survive capture whole, because their own target has a converter.

PyTorch takes a Python function, a Tensor method or a module apart into ATen operators while it
traces. Where one of them has a converter, `keep_whole` puts a call of the higher-order operator
`kept_call` in its place, which tracing carries through to the importer untouched.

Equal targets are found by identity once aliases are resolved: ``F.linear`` is
``torch._C._nn.linear``, and ``torch.Tensor.relu`` is the method ``"relu"``. ``torch.relu``,
``F.relu`` and ``x.relu()`` are three targets, each with arguments of its own; a converter that
is meant for all of them names all of them. A module matches by its class, else by the nearest
base class that has a converter and whose ``forward`` it inherits. What a PyTorch function calls
inside is not looked at. Dynamo inlines Python functions of the user's before a backend sees
them: mark them with ``torch._dynamo.allow_in_graph``; for `fx.symbolic_trace`, with `fx.wrap`.

What cannot be kept soundly is left to PyTorch, with a warning: a call that writes to its
arguments or buffers, a module with hooks or parametrizations, a call that draws random numbers
while gradients are needed (the backward would draw others), and one that returns a view in a
graph that writes in place later. A kept call that returns a view of an argument returns a copy.
"""

from __future__ import annotations

import contextlib
import operator
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from fx2relax.errors import source_line
from fx2relax.graph_tidy import copy_graph
from fx2relax.kept_call import (
    Callee,
    KeptCall,
    call_site,
    inside_kept,
    kept,
    kept_call,
    warn_not_kept,
    weight_names,
)
from fx2relax.kept_modules import altered, keep_inlined_modules, match_module
from fx2relax.module_view import ModuleView
from fx2relax.registry import Converter, kept_whole

__all__ = ["KeptCall", "ModuleView", "keep_whole", "keep_within", "kept", "kept_call"]


def canonical(target: Any) -> Any:
    """One spelling for the targets that are one function: a method descriptor is its name."""
    if isinstance(target, (types.MethodDescriptorType, types.WrapperDescriptorType)):
        name = target.__name__
        if getattr(torch.Tensor, name, None) is target:
            return name
    return target


def _matches(converters: Mapping[Any, Converter], target: Any) -> Converter | None:
    try:
        return converters.get(target)
    except TypeError:  # unhashable
        return None


def written_after(graph: fx.Graph) -> set[fx.Node]:
    """The nodes after which something may write to a tensor that already exists."""
    nodes = list(graph.nodes)
    last = max((i for i, node in enumerate(nodes) if _writes(node)), default=0)
    return set(nodes[:last])


_INPLACE_OPERATORS = {operator.setitem} | {
    function
    for name, function in vars(operator).items()
    if re.fullmatch("i(add|sub|mul|(true|floor)div|mod|pow|matmul|and|x?or|[lr]shift)", name)
}


def _writes(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method", "call_module"):
        return False
    if node.kwargs.get("inplace") or "out" in node.kwargs:
        return True
    if node.op == "call_module":
        root = node.graph.owning_module
        return root is None or any(
            getattr(m, "inplace", False) for m in root.get_submodule(str(node.target)).modules()
        )
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable)
    if node.op == "call_function" and node.target in _INPLACE_OPERATORS:
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _keep_node(
    gm: fx.GraphModule,
    node: fx.Node,
    converters: Mapping[Any, Converter],
    writes_later: bool,
) -> bool:
    """Make a node a kept call if its target has a converter; whether it has."""
    graph = node.graph
    module: torch.nn.Module | None = None
    weights: tuple[str, ...] = ()
    operands: tuple[fx.Node, ...] = ()
    if node.op == "call_module":
        module = gm.get_submodule(str(node.target))
        converter = match_module(type(module), converters)
        target: Any = type(module)
    elif node.op in ("call_function", "call_method"):
        target = canonical(node.target)
        converter = _matches(converters, target)
    else:
        return False
    if converter is None:
        return False
    if module is not None and (reason := altered(module)):
        warn_not_kept(converter, source_line(node) or str(node.target), reason)
        return False
    with graph.inserting_before(node):
        if module is not None:
            weights = tuple(weight_names(module))
            operands = tuple(graph.get_attr(f"{node.target}.{name}") for name in weights)
        callee = Callee(target, converter, module, weights, node.name)
        whole = graph.call_function(
            call_site(callee, writes_later), (*operands, *node.args), dict(node.kwargs)
        )
    whole.meta = dict(node.meta)
    node.replace_all_uses_with(whole)
    name = node.name
    graph.erase_node(node)
    whole._rename(name)
    return True


def _chosen(converters: Mapping[Any, Converter]) -> dict[Any, Converter]:
    return {canonical(t): c for t, c in converters.items() if c.kind != "overload"}


def keep_whole(
    gm: fx.GraphModule,
    converters: Mapping[Any, Converter] | None = None,
    resolve_module: Callable[[str, type], torch.nn.Module | None] | None = None,
) -> fx.GraphModule:
    """Replace the calls whose own target has a converter by calls that tracing keeps whole.

    Args:
        gm: any graph; it is not changed.
        converters: target -> converter; `fx2relax.registry.kept_whole()` when left out.
            Those of ATen overloads are ignored.
        resolve_module: finds the module object for ``(path, class)`` of an inlined module;
            while Dynamo calls a backend, left out, the module is looked up in the user's frame.

    Returns:
        ``gm`` itself when nothing matches, else a new graph module over the same weights. Run
        eagerly it computes what ``gm`` does; traced, it leaves `kept_call` nodes.
    """
    if converters is None:
        converters = kept_whole()
    chosen = _chosen(converters)
    if not chosen:
        return gm
    graph = copy_graph(gm.graph)
    written = written_after(graph)
    changed = keep_inlined_modules(gm, graph, chosen, resolve_module, written)
    for node in list(graph.nodes):
        changed |= _keep_node(gm, node, chosen, node in written)
    if not changed:
        return gm
    graph.lint()
    whole = fx.GraphModule(gm, graph, gm.__class__.__name__)
    for name, value in vars(gm).items():
        whole.__dict__.setdefault(name, value)
    whole.meta = dict(gm.meta)
    return whole


@contextlib.contextmanager
def keep_within(gm: fx.GraphModule, converters: Mapping[Any, Converter]) -> Iterator[None]:
    """While a graph is traced, keep also the calls that its submodules make.

    `fx.symbolic_trace` leaves PyTorch's own modules whole, so the graph does not show the
    ``nn.Linear`` in an ``nn.TransformerEncoderLayer`` nor the attention function it calls.
    """
    called = [gm.get_submodule(str(n.target)) for n in gm.graph.nodes if n.op == "call_module"]
    with keep_inside(called, converters) if called else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def keep_inside(
    called: Sequence[torch.nn.Module], converters: Mapping[Any, Converter]
) -> Iterator[None]:
    """While modules are traced, keep the calls that they make."""
    chosen = _chosen(converters)
    with contextlib.ExitStack() as stack:
        for module in dict.fromkeys(child for root in called for child in root.modules()):
            converter = match_module(type(module), chosen)
            if converter is not None and not altered(module):
                # Not by setattr: the module would refuse a method or register it.
                vars(module)["forward"] = _kept_forward(module, converter)
                stack.callback(vars(module).pop, "forward")
        if chosen:
            stack.enter_context(_KeepFunctions(chosen))
        yield


def _kept_forward(module: torch.nn.Module, converter: Converter) -> Callable[..., Any]:
    names = tuple(weight_names(module))
    callee = Callee(type(module), converter, module, names, type(module).__name__.lower())
    original = module.forward
    site = call_site(callee, writes_later=True)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if inside_kept():
            return original(*args, **kwargs)
        return site(*(operator.attrgetter(name)(module) for name in names), *args, **kwargs)

    return forward


class _KeepFunctions(TorchFunctionMode):
    """Keeps the functions and methods that have converters, wherever they are called."""

    def __init__(self, converters: Mapping[Any, Converter]) -> None:
        super().__init__()
        self.converters = converters

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = canonical(func)
        converter = None if inside_kept() else _matches(self.converters, target)
        if converter is None:
            return func(*args, **(kwargs or {}))
        name = target if isinstance(target, str) else getattr(target, "__name__", "call")
        callee = Callee(target, converter, None, (), name)
        return call_site(callee, writes_later=True)(*args, **(kwargs or {}))
