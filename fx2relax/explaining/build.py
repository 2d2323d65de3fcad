"""A report's data out of a recorder's notes."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from fx2relax.compat import relax
from fx2relax.errors import target_name
from fx2relax.explaining import work
from fx2relax.explaining.lines import layer, lines
from fx2relax.explaining.recorder import GraphNotes, Recorder, Variant
from fx2relax.explaining.report import (
    Break,
    Data,
    Graph,
    Kernel,
    Line,
    Node,
    Weights,
    operations,
)
from fx2relax.kernel_names import computing, readable
from fx2relax.logs import tir
from fx2relax.provenance import Site, Trail, bindings

_EAGER = "eager"


def data(recorder: Recorder, model: str, seconds: float) -> Data:
    """All that is known before anything is measured.

    Args:
        recorder: it looked on while the model was compiled and called.
        model: the model's name.
        seconds: of the first call.
    """
    found = Data(model, seconds=seconds)
    earlier: list[torch.fx.Node] = []
    for number, notes in enumerate(recorder.graphs):
        found.graphs.append(graph_report(notes, number, earlier))
        earlier += notes.graph.graph.nodes
    for captured in recorder.captured:
        reason = getattr(captured, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break:
            frame = reason.user_stack[-1] if reason.user_stack else None
            line = Line(frame.filename, frame.lineno or 0, frame.line or "") if frame else Line()
            found.breaks.append(Break(str(reason.reason).strip(), line))
    for graph, error in recorder.untraced:
        nodes = sum(n.op.startswith("call_") for n in graph.graph.nodes)
        found.eager.append(f"a graph of {nodes} nodes: {type(error).__name__}: {error}")
    return found


def graph_report(
    notes: GraphNotes,
    number: int,
    earlier: list[torch.fx.Node],
    variant: Variant | None = None,
) -> Graph:
    """What is known of one graph.

    Args:
        notes: a recorder's.
        number: its place among the graphs.
        earlier: the nodes of the graphs before it.
        variant: one of its programs; the one that runs when left out.
    """
    variant = variant or notes.chosen
    graph = Graph(f"{notes.phase} {number}", notes.phase, variant.library if variant else _EAGER)
    graph.fx = notes.graph.print_readable(print_output=False)
    graph.stages = {k: v for k, v in notes.seconds.items() if k != "all"}
    graph.stages["other"] = max(0.0, notes.seconds["all"] - sum(graph.stages.values()))
    if notes.error is not None:
        graph.why = f"{type(notes.error).__name__}: {notes.error}"
    elif notes.contest is not None and notes.contest.in_eager:
        graph.runs, graph.why = _EAGER, "eager was faster in the first calls, and runs instead"
    elif len(notes.variants) > 1:
        graph.why = "the fastest of its ways in the first calls"
    sites: list[Site] = []
    trail = None
    if variant is not None and notes.imported is not None:
        trail, sites = sites_of(notes, variant)
        graph.relax = notes.imported["mod"].script(show_meta=False)
        graph.tir = tir.text({"mod": variant.lowered})
        graph.weights = _weights(notes, variant)
        graph.memory, graph.unplanned = _memory(variant)
    calls = _calls(notes)
    relax_operators = _relax_operators(notes)
    for node, line in _lined(notes, earlier):
        graph.nodes.append(_node(node, line, notes, relax_operators))
    by_node = {node.name: node for node in graph.nodes}
    computed = [[by_node[name] for name in site.nodes if name in by_node] for site in sites]
    counts = operations(computed)
    for place, site in enumerate(sites):
        own = [node.name for node in computed[place]]
        kernel = Kernel(place, readable(site, calls), _how(site, calls), own, sum(counts[place]))
        kernel.bytes = work.bytes_of([*site.inputs, site.output])
        graph.kernels.append(kernel)
        for name in own:
            by_node[name].kernels.append(place)
    if trail is not None:
        _ways(graph, trail)
    return graph


def sites_of(notes: GraphNotes, variant: Variant) -> tuple[Trail, list[Site]]:
    """The calls that a program makes, and who followed its nodes through the passes."""
    assert notes.imported is not None
    order = computing(notes.graph)
    trail = Trail(notes.imported["name"], notes.imported["origins"], order)
    modules = (variant.legal, variant.grouped, variant.lowered, variant.ready)
    sites = trail.sites(notes.imported["mod"], *modules)
    variant.symbols = [site.symbol for site in sites]
    return trail, sites


def _computes(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem


def _lined(notes: GraphNotes, earlier: list[torch.fx.Node]) -> list[tuple[torch.fx.Node, Line]]:
    nodes = list(notes.graph.graph.nodes)
    known = lines(nodes, earlier, notes.caller)
    return [(node, known[node]) for node in nodes if _computes(node)]


def _calls(notes: GraphNotes) -> dict[str, Any]:
    """The nodes that run in PyTorch, by the name of their packed function."""
    return dict(notes.imported["torch_calls"]) if notes.imported is not None else {}


def _node(
    node: torch.fx.Node, line: Line, notes: GraphNotes, operators: Mapping[str, list[str]]
) -> Node:
    found = Node(node.name, target_name(node.target), line, layer(node))
    found.shape = ", ".join(
        f"{str(v.dtype).removeprefix('torch.')}[{', '.join(map(str, v.shape))}]"
        for v in pytree.tree_leaves(node.meta.get("val"))
        if isinstance(v, torch.Tensor)
    )
    found.operations, found.rest = work.operations(node), work.elements(node)
    if notes.imported is None:
        found.how, found.why = "torch", "the graph runs in PyTorch"
        return found
    for declined, reason in notes.imported["declined"]:
        if declined == node.name:
            found.how, found.why = "torch", reason or "it has no converter"
    if node.name in notes.imported["folded"]:
        found.how, found.why = "nothing", "always the same: computed while the graph was compiled"
    found.relax = operators.get(node.name, [])
    return found


def _relax_operators(notes: GraphNotes) -> dict[str, list[str]]:
    """The Relax operators of each node's bindings."""
    found: dict[str, list[str]] = defaultdict(list)
    made = notes.imported
    if made is None:
        return found
    for binding in bindings(made["mod"][made["name"]]):
        node = made["origins"].get(binding.var.name)
        name = _operator(binding.value)
        if node is not None and name:
            found[node].append(name)
    return found


def _operator(value: Any) -> str:
    name = str(getattr(getattr(value, "op", None), "name", ""))
    if name == "relax.call_tir":
        return f"call_tir {value.args[0].name_hint}"
    if name in ("relax.call_dps_packed", "relax.call_pure_packed"):
        return f"call {value.args[0].global_symbol}"
    return name.removeprefix("relax.")


def _how(site: Site, calls: dict[str, Any]) -> str:
    if site.kind == "kernel":
        return "generated"
    call = calls.get(site.symbol)
    return "torch" if call is not None and not call.library else "library"


def _ways(graph: Graph, trail: Trail) -> None:
    """How each node is computed, by what computes it."""
    for node in graph.nodes:
        if node.how not in ("generated", "nothing"):
            continue
        kinds = {graph.kernels[place].how for place in node.kernels}
        if node.how == "nothing":
            if kinds:  # each call returns a tensor of its own
                node.how, node.why = kinds.pop(), f"{node.why}, and copied"
        elif kinds:
            node.how = next(k for k in ("torch", "library", "generated") if k in kinds)
        elif node.name in trail.lifted:
            node.how = "weights"
            node.why = "done once: it works on weights alone"
        else:
            node.how = "nothing"
            node.why = "a view of what is there already, or read by nothing"


def _weights(notes: GraphNotes, variant: Variant) -> Weights:
    assert notes.imported is not None
    frozen = [s for s in notes.specs if s.kind != "user" and isinstance(s.val, torch.Tensor)]
    found = Weights(len(frozen), sum(s.val.numel() * s.val.element_size() for s in frozen))
    name = f"{notes.imported['name']}_transform_params"
    if name in [g.name_hint for g in variant.lowered.get_global_vars()]:
        function = variant.lowered[name]
        made = [b for block in function.body.blocks for b in block.bindings]
        results = next((b.value for b in reversed(made) if b.var.same_as(function.body.body)), None)
        own = {b.var for b in made}
        fields = results.fields if isinstance(results, relax.Tuple) else []
        new = [f for f in fields if f in own and not _names_a_weight(f, made)]
        found.made = len(new)
        found.made_bytes = work.bytes_of([f.ty for f in new])
    return found


def _names_a_weight(var: Any, made: list[Any]) -> bool:
    value = next(b.value for b in made if b.var.same_as(var))
    return isinstance(value, (relax.TupleGetItem, relax.Var))


def _memory(variant: Variant) -> tuple[int, int]:
    """Bytes of planned storages, and of all intermediate values."""
    planned = relax.transform.StaticPlanBlockMemory()(variant.ready)
    storages = tensors = 0
    for _, function in planned.functions_items():
        if not isinstance(function, relax.Function):
            continue
        for block in getattr(function.body, "blocks", ()):
            for binding in block.bindings:
                name = str(getattr(getattr(binding.value, "op", None), "name", ""))
                if name == "relax.memory.alloc_storage":
                    storages += work.bytes_of([relax.TensorType(binding.value.args[0], "uint8")])
                elif name == "relax.memory.alloc_tensor":
                    tensors += work.bytes_of([binding.var.ty])
    return storages, tensors
