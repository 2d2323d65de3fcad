"""Modules that were inlined into a graph, found again as one call.

Dynamo writes what a module does, not that it was called: its nodes carry the module in
``meta["nn_module_stack"]``, and neither the arguments nor the module object is in the graph. The
object is found in the user's frame, which is there while Dynamo calls a backend. The arguments are
guessed and the guess is proved: the module, called with them on fake tensors, must compute the
very expressions that the graph's nodes compute.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._guards import detect_fake_mode

from fx2relax.errors import source_line
from fx2relax.kept_call import Callee, call_site, warn_not_kept, weight_names
from fx2relax.kept_probe import fake_copies, outside_tracing
from fx2relax.module_view import functional_call
from fx2relax.registry import Converter
from fx2relax.same_values import Values, trace

Resolve = Callable[[str, type], torch.nn.Module | None]
_MAX_GUESSES = 64
_STEP = re.compile(r"\.(\w+)|\[(?:'([^']*)'|\"([^\"]*)\"|(\d+))\]")


def match_module(cls: type, converters: Mapping[Any, Converter]) -> Converter | None:
    """The converter of a module class or of the nearest base class that has one.

    A class that overrides ``forward`` computes something else than its base.
    """
    found = next((base for base in cls.__mro__ if base in converters), None)
    if found is None or getattr(cls, "forward", None) is not getattr(found, "forward", None):
        return None
    return converters[found]


def altered(module: torch.nn.Module) -> str:
    """What makes a module compute something else than its class says, or an empty string."""
    for child in module.modules():
        if "forward" in vars(child):
            return "its forward has been replaced"
        if torch.nn.utils.parametrize.is_parametrized(child):
            return "it is parametrized"
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        if any(getattr(child, name, None) for name in hooks):
            return "it has hooks"
    return ""


@dataclass
class Group:
    """The nodes of one call of a module.

    Attributes:
        key: the stack entry's key: the module's id, and after ``@`` which call of it this is.
        path: where the module stands in the user's code, such as ``L['self'].layers.0``.
        cls: the module's class.
        converter: what converts it.
        nodes: in the order of the graph.
    """

    key: str
    path: str
    cls: type
    converter: Converter
    nodes: list[fx.Node] = field(default_factory=list)

    @property
    def inputs(self) -> list[fx.Node]:
        """The nodes outside whose values are used inside, in order of first use."""
        inside = set(self.nodes)
        used = (i for n in self.nodes for i in n.all_input_nodes if i not in inside)
        return list(dict.fromkeys(used))

    @property
    def outputs(self) -> list[fx.Node]:
        """The nodes whose values are used outside."""
        inside = set(self.nodes)
        return [n for n in self.nodes if any(u not in inside for u in n.users)]


def keep_inlined_modules(
    gm: fx.GraphModule,
    graph: fx.Graph,
    converters: Mapping[Any, Converter],
    resolve: Resolve | None,
    written: set[fx.Node],
) -> bool:
    """Replace the nodes of inlined modules that have converters by calls of them.

    Args:
        gm: the graph module that the graph came from.
        graph: changed in place.
        converters: by target; those of module classes are looked at.
        resolve: finds a module by its path and class; by default in the user's frame.
        written: the nodes after which something may be written in place.

    Returns:
        Whether the graph has changed.
    """
    classes = {t: c for t, c in converters.items() if c.kind == "module"}
    changed = False
    for group in _groups(graph, classes):
        reason = _keep_group(gm, graph, group, resolve or _from_frame(group.key), written)
        if reason:
            where = next(filter(None, map(source_line, group.nodes)), "")
            warn_not_kept(group.converter, where or group.path, reason)
        else:
            changed = True
    return changed


def _groups(graph: fx.Graph, classes: Mapping[Any, Converter]) -> list[Group]:
    """The calls of modules that have converters; the outermost of nested ones."""
    found: dict[tuple[Any, ...], Group] = {}
    if not classes:
        return []
    named = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in classes}
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method", "call_module"):
            continue
        if node.target == "_guards_fn":  # input checks, which torch.export puts anywhere
            continue
        outer: list[tuple[str, str]] = []
        for key, (path, cls) in node.meta.get("nn_module_stack", {}).items():
            if node.op == "call_module" and path == node.target:
                break  # not inlined: the node calls the module itself
            outer.append((str(key), str(path)))
            cls = named.get(cls, cls)  # torch.export writes classes by name
            converter = match_module(cls, classes) if isinstance(cls, type) else None
            if converter is not None:
                group = Group(str(key), str(path), cls, converter)
                found.setdefault(tuple(outer), group).nodes.append(node)
                break
    return list(found.values())


def _keep_group(
    gm: fx.GraphModule, graph: fx.Graph, group: Group, resolve: Resolve, written: set[fx.Node]
) -> str:
    """Put one call in place of a group's nodes; returns why not, or an empty string."""
    module = resolve(group.path, group.cls)
    if module is None or type(module) is not group.cls:
        leaf = "" if group.path.startswith(("L[", "G[")) else "; make it a leaf when tracing"
        return f"the module object at {group.path} is not in the graph{leaf}"
    if reason := altered(module):
        return reason
    inputs, outputs = group.inputs, group.outputs
    position = {node: i for i, node in enumerate(graph.nodes)}
    start = max((position[i] for i in inputs), default=-1)
    inside = set(group.nodes)
    uses = [position[u] for o in outputs for u in o.users if u not in inside]
    if uses and start >= min(uses):
        return "its nodes are interleaved with others that use them"
    weights = _weight_nodes(gm, module, inputs)
    others = [n for n in inputs if n not in weights.values() and not _is_number(n)]
    solution = _solve(gm, module, group, weights, others)
    if isinstance(solution, str):
        return solution
    args, kwargs, leaves = solution
    name = outputs[0].name if len(outputs) == 1 else group.cls.__name__.lower()
    callee = Callee(group.cls, group.converter, module, tuple(weights), name)
    first = group.nodes[0]
    late = (n for n in graph.nodes if position[n] > start)
    anchor = first if start < position[first] else next(late)
    with graph.inserting_before(anchor):
        site = call_site(callee, any(n in written for n in group.nodes))
        whole = graph.call_function(site, (*weights.values(), *args), kwargs)
        whole.meta = dict(outputs[0].meta) if outputs else dict(first.meta)
        whole.meta.pop("example_value", None)
        for output, index in zip(outputs, leaves, strict=True):
            value = graph.call_function(_leaf, (whole, index))
            value.meta = dict(output.meta)
            output.replace_all_uses_with(value, lambda user: user not in inside)
    for node in reversed(group.nodes):
        graph.erase_node(node)
    return ""


def _leaf(result: Any, index: int) -> Any:
    """One of the tensors in what a module returned."""
    return pytree.tree_leaves(result)[index]


def _weight_nodes(
    gm: fx.GraphModule, module: torch.nn.Module, inputs: Sequence[fx.Node]
) -> dict[str, fx.Node]:
    """The nodes that hold a module's own weights, by name; a tied weight under each name."""
    by_tensor = {id(tensor): node for node in inputs if (tensor := _held(gm, node)) is not None}
    named = {}
    for name in weight_names(module):
        owner, _, attribute = name.rpartition(".")
        tensor = getattr(module.get_submodule(owner), attribute)
        if id(tensor) in by_tensor:
            named[name] = by_tensor[id(tensor)]
    return named


def _held(gm: fx.GraphModule, node: fx.Node) -> Any:
    """The real tensor that a node stands for, where it is known."""
    if node.op == "get_attr":
        value: Any = gm
        for part in str(node.target).split("."):
            value = getattr(value, part, None)
        return value
    return getattr(node.meta.get("grapharg"), "example", None)


def _solve(
    gm: fx.GraphModule,
    module: torch.nn.Module,
    group: Group,
    weights: Mapping[str, fx.Node],
    others: list[fx.Node],
) -> tuple[tuple[Any, ...], dict[str, Any], list[int]] | str:
    """The arguments that the module was called with, and which of its results each output is.

    Returns ``(args, kwargs, leaves)`` with graph nodes as arguments, or why there is no answer.
    """
    nodes = [*dict.fromkeys(weights.values()), *others]
    fakes = [n.meta.get("example_value", n.meta.get("val")) for n in nodes]
    mode = detect_fake_mode(fakes)
    if mode is None:
        return "the graph carries no fake tensors to prove its arguments with"
    tensors = [n for n, f in zip(nodes, fakes, strict=True) if isinstance(f, torch.Tensor)]
    candidates = [n for n in tensors if n not in weights.values()]
    with outside_tracing(mode), mode:
        copies = fake_copies(mode, fakes)
        values = Values(len(nodes))
        try:
            wanted = values.number(trace(_subgraph(gm, group, nodes), copies))
        except Exception as error:
            return f"its nodes could not be traced ({error})"
        if wanted is None:
            return "it writes to tensors in place"
        at = {node: i for i, node in enumerate(nodes)}
        for args, kwargs in itertools.islice(_guesses(module, candidates), _MAX_GUESSES):

            def call(*flat: Any, args: Any = args, kwargs: Any = kwargs) -> list[Any]:
                state = {name: flat[at[node]] for name, node in weights.items()}
                real = fx.map_arg((args, kwargs), lambda n: flat[at[n]])
                out = functional_call(module, state, real[0], real[1])
                return list(pytree.tree_leaves(out))

            try:
                got = values.number(trace(call, copies))
            except Exception:  # a wrong guess may fail in any way
                continue
            if got is not None and all(v in got for v in wanted):
                return args, kwargs, [got.index(v) for v in wanted]
    return "the arguments that it was called with could not be told from the graph"


def _is_number(node: fx.Node) -> bool:
    """Whether a node is a Python number of the user's, which Dynamo passes as a tensor."""
    passed_as_tensor = getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False)
    return passed_as_tensor or isinstance(node.meta.get("example_value"), torch.SymFloat)


def _subgraph(gm: fx.GraphModule, group: Group, inputs: Sequence[fx.Node]) -> Callable[..., Any]:
    """The group's nodes as a function of its inputs.

    A number such as a norm's ``eps`` becomes a constant, and reading it as a float tells Dynamo to
    guard on it: the converter reads it from the module.
    """
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {n: graph.placeholder(f"arg{i}") for i, n in enumerate(inputs)}
    for node in (*group.inputs, *group.nodes):
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymFloat) and value.node.has_hint():
            env[node] = float(value)
    for node in group.nodes:
        if node not in env:
            env[node] = graph.create_node(
                node.op, node.target, *fx.map_arg((node.args, node.kwargs), lambda n: env[n])
            )
    graph.output([env[node] for node in group.outputs])
    return fx.GraphModule(gm, graph)


def _guesses(
    module: torch.nn.Module, tensors: list[fx.Node]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments that may have been given, likelier ones first; each tensor is used."""
    parameters = inspect.signature(module.forward).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    starred = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    flags: list[dict[str, Any]] = [{}]
    flags += [{p.name: not p.default} for p in parameters if isinstance(p.default, bool)]
    top = max(len(tensors), len(required)) if starred else len(positional)
    counts = [len(tensors), *range(len(required), min(top, 6) + 1)]
    for given, flag in itertools.product(dict.fromkeys(counts), flags):
        if not len(required) <= given <= top:
            continue
        names = {p.name for p in positional[:given]}
        if names & set(flag):
            continue
        # In the order of first use, then any order with repeats; None for optional ones.
        optional = [p.default is not p.empty for p in positional] + [False] * given
        choices = [[*tensors, None] if optional[i] else tensors for i in range(given)]
        spread = itertools.product(*choices)
        for args in itertools.chain([tuple(tensors)] if given == len(tensors) else [], spread):
            if set(tensors) <= set(args):
                yield args, flag
    if len(tensors) >= 2 and len(positional) >= 2:  # a state given as a tuple, as to an LSTM
        for order in itertools.permutations(tensors):
            yield (order[0], tuple(order[1:])), {}


def _from_frame(key: str) -> Resolve:
    """Look a module up in the frame that Dynamo is tracing.

    Args:
        key: the stack entry's key; where it is the module's id, another object is refused.
    """

    def resolve(path: str, cls: type) -> torch.nn.Module | None:
        identity = key.partition("@")[0]
        for scope in _scopes():
            roots = [v for v in scope.values() if isinstance(v, torch.nn.Module)]
            found = _follow(scope, path)
            for module in itertools.chain([found], *(root.modules() for root in roots)):
                if (
                    isinstance(module, torch.nn.Module)
                    and type(module) is cls
                    and (
                        str(id(module)) == identity or (not identity.isdigit() and module is found)
                    )
                ):
                    return module
        return None

    return resolve


def _scopes() -> list[Mapping[str, Any]]:
    """The variables of the frame that Dynamo is tracing; none outside of a backend's call."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        output: Any = InstructionTranslator.current_tx().output
        return [output.local_scope, output.global_scope]
    except (ImportError, AttributeError, AssertionError):
        return []


def _follow(scope: Mapping[str, Any], path: str) -> Any:
    """The object at a path such as ``L['self'].layers.0`` or ``G['m']._modules['fc']``."""
    value: Any = None
    for position, step in enumerate(_STEP.finditer(path)):
        name, index = step[1] or step[2] or step[3], step[4]
        try:
            if position == 0:
                value = scope[name]
            elif isinstance(value, torch.nn.Module) and name in value._modules:
                value = value._modules[name]
            elif isinstance(value, Mapping):
                value = value[name]
            else:
                value = getattr(value, name) if name else value[int(index)]
        except (KeyError, AttributeError, IndexError, TypeError):
            return None
    return value
