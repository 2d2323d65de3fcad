"""Indices that a graph of tensors on a GPU makes on the processor, made on the GPU.

``x[torch.arange(n)]`` and ``torch.arange(n).to(x.device)`` say nothing of where the numbers are to
be made, and a program is for one device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch._guards import detect_fake_mode
from torch.utils import _pytree as pytree

from fx2relax.devices import with_index
from fx2relax.gpu_graphs import target_of

Node = torch.fx.Node
_aten = torch.ops.aten
# They take indices from another device than the tensor that is indexed.
_INDEXED = frozenset(
    {
        *(_aten.index.Tensor, _aten._unsafe_index.Tensor, _aten.index_put.default),
        *(_aten._unsafe_index_put.default, _aten._index_put_impl.default),
    }
)
_CPU = torch.device("cpu")


def make_on_gpu(graph: torch.fx.GraphModule) -> None:
    """Change a graph in place so that it makes what it reads indices from where its tensors are.

    Whole numbers and truth values alone, since others may be rounded otherwise there, and only if
    nothing of the processor's is left. Random draws stay.

    Args:
        graph: a functional ATen graph; every node carries its fake value in ``meta["val"]``.
    """
    nodes = [n for n in graph.graph.nodes if n.op in ("call_function", "get_attr")]
    places = {with_index(t.device) for n in graph.graph.nodes for t in _tensors(n)}
    there = {n for n in nodes if any(t.device == _CPU for t in _tensors(n))}
    others = places - {_CPU}
    if not there or len(others) != 1 or next(iter(others)).type != "cuda":
        return
    if not all(_moves(node, there) for node in there):
        return
    device = next(iter(others))
    mode = detect_fake_mode([t for n in nodes for t in _tensors(n)])
    for node in nodes:
        if node in there:
            _move(graph, node, device, mode)


def _tensors(node: Node) -> list[torch.Tensor]:
    return [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]


def _moves(node: Node, there: set[Node]) -> bool:
    """Whether a node can make its numbers on the GPU, for all who read them."""
    if any(t.is_floating_point() or t.is_complex() for t in _tensors(node)):
        return False
    if any(n not in there and _tensors(n) for n in node.all_input_nodes):
        return False
    target: Any = node.target
    if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
        return False
    return all(user in there or _takes(user, node) for user in node.users)


def _takes(user: Node, node: Node) -> bool:
    """Whether a node that gives tensors on the GPU takes these from wherever they are."""
    if target_of(user) in _INDEXED:
        read = [v for i, v in enumerate(user.args) if i != 1]
        return node not in pytree.tree_leaves((read, user.kwargs))
    return target_of(user) is _aten._to_copy.default


def _move(graph: torch.fx.GraphModule, node: Node, device: torch.device, mode: Any) -> None:
    if node.op == "get_attr":
        parent, _, name = str(node.target).rpartition(".")
        holder = graph.get_submodule(parent)
        fresh = f"{name}_on_gpu"
        if not hasattr(holder, fresh):
            held = getattr(holder, name).to(device)
            holder.register_buffer(fresh, held, persistent=False)
        node.target = f"{parent}.{fresh}" if parent else fresh
    else:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and any(a.name == "device" for a in schema.arguments):
            node.kwargs = {**node.kwargs, "device": device}

    def moved(val: Any) -> Any:
        with mode:
            return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=device)

    node.meta["val"] = pytree.tree_map_only(torch.Tensor, moved, node.meta["val"])
