"""Slices of an input that a graph writes to, as elements at indices.

``cache[:, start:end] = x`` comes as a tensor of the cache's size in which a part is another's. As
`index_put` it is a kernel that may write to the cache at once, see `pipeline.in_place`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx2relax.layouts import concrete

aten = torch.ops.aten
Node = torch.fx.Node

# Below so many elements, or where more than such a part is written, a copy is as fast.
_LEAST = 1 << 14
_PART = 4
# What a nest of scatters leads through to the tensor that is changed.
_VIEWS: dict[Any, Any] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
}


@dataclass
class _Range:
    """Places along an axis: from a start, in steps, to an end that is none of them."""

    start: Any
    end: Any
    step: int
    selected: bool = False


def at_indices(graph: torch.fx.GraphModule, write: Node) -> None:
    """Put `index_put` in the place of the scatters of slices that lead to a write.

    Args:
        graph: it is changed; its values are the same.
        write: a call of `copy_`, to an input.
    """
    target: Any = write.args[0]
    value: Any = write.args[1]
    while isinstance(value, Node) and value is not target and value.target in _VIEWS:
        before = value.args[0]
        found = _nested(value)
        if found is not None and _pays(value, found[1]):
            _replace(graph, value, *found)
        value = before


def _pays(node: Node, source: Node) -> bool:
    whole, part = concrete([node.meta["val"].numel(), source.meta["val"].numel()])
    on_cpu = node.meta["val"].device.type == "cpu"
    return on_cpu and whole >= _LEAST and 0 < part * _PART <= whole


def _nested(node: Node) -> tuple[dict[int, _Range], Node] | None:
    """The ranges that a nest of scatters writes to, by axis, and what is written there."""
    ranges: dict[int, _Range] = {}
    base: Any = node.args[0]
    axes = list(range(base.meta["val"].dim()))  # those of the tensor that are left in the view
    while True:
        view = _view(node)
        if view is None:
            return None
        axis, found = view
        source: Any = node.args[1]
        if not isinstance(source, Node):
            return None
        sizes = node.meta["val"].shape
        whole = found.start == 0 and found.step == 1 and not found.selected
        if not (whole and _same(found.end, sizes[axis])):
            if axes[axis] in ranges or isinstance(found.end, torch.SymInt):
                return None
            ranges[axes[axis]] = found
        if found.selected:
            del axes[axis]
        inner: Any = source.args[0] if source.target in _VIEWS else None
        if not isinstance(inner, Node) or inner.target is not _VIEWS[node.target]:
            break
        # The view that the inner scatter changes has to be of the same part.
        if inner.args[0] is not base or inner.args[1:] != node.args[2:]:
            break
        if node.kwargs or inner.kwargs:
            break
        node, base = source, inner
    order = sorted(ranges)
    if not order or order != list(range(order[0], order[-1] + 1)):
        return None
    return ranges, source


def _view(node: Node) -> tuple[int, _Range] | None:
    """The axis of a scatter and its range, if its places are known to lie within the axis."""
    sizes = node.meta["val"].shape
    given: dict[str, Any] = dict(zip(("dim", "start", "end", "step"), node.args[2:], strict=False))
    given |= node.kwargs
    axis, step = given.get("dim", 0) % len(sizes), given.get("step", 1)
    size = sizes[axis]
    if node.target is aten.select_scatter.default:
        index = given.get("index", given.get("start"))
        start = _place(index, size) if isinstance(index, int) else index
        if start is None or not _positive(start):
            return None
        return axis, _Range(start, start + 1 if isinstance(start, int) else None, 1, True)
    start, end = given.get("start"), given.get("end")
    if start is None or isinstance(start, int):
        start = _place(start or 0, size)
    if end is None or end == torch.iinfo(torch.int64).max:
        end = size
    elif isinstance(end, int):
        end = min(_place(end, size) or 0, size) if isinstance(size, int) else None
    if not isinstance(step, int) or start is None or end is None or not _positive(start):
        return None
    return axis, _Range(start, end, step)


def _place(index: int, size: Any) -> int | None:
    if index >= 0:
        return index
    return index + size if isinstance(size, int) else None


def _positive(value: Any) -> bool:
    """Whether a number is known not to be negative."""
    own = value.meta["val"] if isinstance(value, Node) else value
    return bool(statically_known_true(own >= 0))


def _same(a: Any, b: Any) -> bool:
    own = a.meta["val"] if isinstance(a, Node) else a
    return bool(statically_known_true(own == b))


def _replace(
    graph: torch.fx.GraphModule, node: Node, ranges: dict[int, _Range], source: Node
) -> None:
    """One nest of scatters, of a tensor and of views of it, as one call."""
    base: Any = node.args[0]
    maker = _Maker(graph, node)
    order = sorted(ranges)
    indices: list[Node | None] = [None] * order[0]
    value = source
    for axis in order:
        places = ranges[axis]
        end = places.end
        if end is None:
            end = maker.number(operator.add, places.start, 1)
        index = maker.tensor(aten.arange.start_step, places.start, end, places.step)
        if places.selected:
            value = maker.tensor(aten.unsqueeze.default, value, axis)
        for _ in range(order[-1] - axis):
            index = maker.tensor(aten.unsqueeze.default, index, -1)
        indices.append(index)
    shape = value.meta["val"].shape
    lengths = [index.meta["val"].shape[0] for index in indices if index is not None]
    if not all(map(_same, lengths, shape[order[0] : order[-1] + 1])):
        maker.undo()  # a slice that ends before it says
        return
    new = maker.tensor(aten.index_put.default, base, indices, value)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    _erase(graph.graph, node)


class _Maker:
    """Makes nodes, with fake values, in front of one."""

    def __init__(self, graph: torch.fx.GraphModule, node: Node) -> None:
        self._graph, self._node = graph.graph, node
        self._mode: Any = detect_fake_mode([node.meta["val"]])
        self._made: list[Node] = []

    def number(self, function: Any, *args: Any) -> Node:
        """A call of Python's on numbers."""
        return self._call(function, function(*self._values(args)), args, {})

    def tensor(self, target: Any, *args: Any) -> Node:
        """A call of an operator."""
        kwargs: dict[str, Any] = {}
        if target is aten.arange.start_step:
            kwargs = {"dtype": torch.int64, "device": self._node.meta["val"].device}
        with self._mode:
            val = target(*self._values(args), **kwargs)
        return self._call(target, val, args, kwargs)

    def _values(self, args: Any) -> Any:
        return torch.fx.node.map_arg(args, lambda n: n.meta["val"])

    def _call(self, target: Any, val: Any, args: Any, kwargs: dict[str, Any]) -> Node:
        with self._graph.inserting_before(self._node):
            node = self._graph.call_function(target, args, kwargs)
        node.meta = {k: self._node.meta[k] for k in ("stack_trace",) if k in self._node.meta}
        node.meta["val"] = val
        self._made.append(node)
        return node

    def undo(self) -> None:
        """Take the nodes out again."""
        for node in reversed(self._made):
            self._graph.erase_node(node)


def _erase(graph: torch.fx.Graph, node: Node) -> None:
    """Erase a node that nobody reads, and what it alone has read."""
    sources = node.all_input_nodes
    graph.erase_node(node)
    for source in sources:
        if not source.users and source.target in (*_VIEWS, *_VIEWS.values()):
            _erase(graph, source)
