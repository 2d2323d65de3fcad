"""A convolution net on a GPU with its channels last.

Tensor cores multiply what has its channels side by side: cuDNN transposes halves that lie otherwise
before each convolution, and after it. Here a net of them has its input transposed once, and its
weights, which is work on weights alone; what stands between its convolutions is computed on tensors
of [n, ...space, c]. In float32 a net lies as eager's does. What the graph returns lies as it did.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from fx2relax.gpu_graphs import Rewrite, val_of
from fx2relax.layouts import concrete, dense_permutation
from fx2relax.runtime import guarded as guarded  # registers what is called

Node = torch.fx.Node
Order = tuple[int, ...]
_aten = torch.ops.aten
#: By how many axes a tensor has: their order with the channels last, and the way back.
LAST: dict[int, Order] = {4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}
FIRST: dict[int, Order] = {4: (0, 3, 1, 2), 5: (0, 4, 1, 2, 3)}
_HALF = (torch.float16, torch.bfloat16)
_CONVOLUTION = _aten.convolution.default
_JOINED = torch.ops.fx2relax.convolution_relu.default
# Where a convolution's tensors of its own rank stand among its arguments.
_TENSORS: dict[Any, tuple[int, ...]] = {_CONVOLUTION: (0, 1), _JOINED: (0, 1, 3)}
# Kernels of PyTorch's that read and write either layout.
_EITHER = frozenset(
    f"aten::{name}"
    for name in (
        *("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "upsample_nearest2d"),
        *("upsample_bilinear2d", "upsample_bicubic2d"),
    )
)


def put_channels_last(rewrite: Rewrite) -> None:
    """Lay tensors between convolutions with frozen weights out with their channels last.

    Those in float16 and bfloat16, and in float32 those that lie so in eager. Pointwise operators,
    concatenations and windows between them follow; anything else reads a tensor as it was.
    """
    layout = _Layout(rewrite)
    for node in list(rewrite.graph.nodes):
        if node.op == "call_function" and not node._erased:
            layout.visit(node)
    layout.tidy()


class _Layout:
    """Which nodes of a graph have their values with the channels last, and in what node."""

    def __init__(self, rewrite: Rewrite) -> None:
        self.rewrite = rewrite
        # By a node of the graph: the node that has its values so.
        self.last: dict[Node, Node] = {}
        # By such a node: what has the axes in their own order again, without a copy.
        self.views: dict[Node, Node] = {}
        # The nodes that are computed so.
        self.settled: set[Node] = set()
        self.made: list[Node] = []

    def visit(self, node: Node) -> None:
        """Let a node read and write tensors with their channels last, if it is to."""
        places = self._convolved(node)
        if places:
            self._call(node, places)
            return
        if not any(n in self.settled for n in node.all_input_nodes):
            return
        if not isinstance(node.target, torch._ops.OpOverload):
            return
        schema = node.target._schema
        if schema.name in _EITHER:
            self._call(node, (0,))
        elif node.target is _aten.cat.default:
            self._cat(node)
        elif node.target is _aten.mean.dim:
            self._mean(node)
        elif torch.Tag.pointwise in node.target.tags or _casts(node):
            self._pointwise(node)

    def tidy(self) -> None:
        """Take away what nothing came to read."""
        for node in reversed(self.made):
            if not node._erased:
                self.rewrite.drop(node)

    def _convolved(self, node: Node) -> tuple[int, ...]:
        """Where the tensors stand that a convolution reads so; nothing for any other node."""
        places, val = _TENSORS.get(node.target, ()), val_of(node)
        if not places or val is None or val.dim() not in LAST:
            return ()
        x, weight = node.args[:2]
        if weight not in self.rewrite.weights or x in self.rewrite.weights:
            return ()
        single = val.dtype is torch.float32
        lies = x in self.settled or any(_lies_last(v) for v in (val_of(x), val) if v is not None)
        if val.dtype in _HALF or (single and lies):
            return tuple(place for place in places if node.args[place] is not None)
        return ()

    # -- nodes ---------------------------------------------------------------------------------

    def _call(self, node: Node, places: tuple[int, ...]) -> None:
        """PyTorch's kernel on views of tensors with their channels last."""
        val = node.meta["val"]
        vals = val if isinstance(val, (tuple, list)) else [val]
        if any(not isinstance(v, torch.Tensor) or v.dim() not in LAST for v in vals):
            return
        rank = vals[0].dim()
        args: list[Any] = list(node.args)
        laid = [self.rewrite.like(v, v.shape, LAST[rank]) for v in vals]
        with self.rewrite.graph.inserting_before(node):
            for place in places:
                args[place] = self._view(self._last(args[place]))
            whole = laid[0] if vals[0] is val else tuple(laid)
            new = self.rewrite.emit(node, node.target, *args, val=whole, **node.kwargs)
        if vals[0] is val:
            self._settle(node, new, laid[0])
            return
        for item in list(node.users):
            if item.target is operator.getitem:
                index: Any = item.args[1]
                with self.rewrite.graph.inserting_before(item):
                    part = self.rewrite.emit(item, operator.getitem, new, index, val=laid[index])
                self._settle(item, part, laid[index])

    def _pointwise(self, node: Node) -> None:
        val = val_of(node)
        if val is None or val.dim() not in LAST:
            return
        tensors = [n for n in node.all_input_nodes if val_of(n) is not None]
        if not all(_follows(n.meta["val"], val) for n in tensors):
            return
        with self.rewrite.graph.inserting_before(node):
            given = {n: self._operand(n, val.dim()) for n in tensors}
            turn = lambda n: given.get(n, n)  # noqa: E731
            args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), turn)
            new = self.rewrite.emit(node, node.target, *args, val=self._compact(val), **kwargs)
        self._settle(node, None, val, new)

    def _cat(self, node: Node) -> None:
        """Tensors that are joined, each with its channels last."""
        val = val_of(node)
        parts: Any = node.args[0]
        axis: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        if val is None or val.dim() not in LAST or not isinstance(parts, (list, tuple)):
            return
        vals = [val_of(p) for p in parts]
        if any(v is None or v.dim() != val.dim() for v in vals):
            return
        with self.rewrite.graph.inserting_before(node):
            laid = [self._last(p) for p in parts]
            place = LAST[val.dim()].index(axis % val.dim())
            new = self.rewrite.emit(node, node.target, laid, place, val=self._compact(val))
        self._settle(node, None, val, new)

    def _mean(self, node: Node) -> None:
        """The mean over all of space, where a network ends, as it lies."""
        x, axes, *keeps = node.args
        source, val = val_of(x), val_of(node)
        if source is None or val is None or source.dim() not in LAST or not isinstance(axes, list):
            return
        rank, space = source.dim(), list(range(1, source.dim() - 1))
        if sorted(int(a) % rank for a in axes) != list(range(2, rank)):
            return
        assert isinstance(x, Node)
        with self.rewrite.graph.inserting_before(node):
            wide = self._compact(val) if val.dim() == rank else val
            given = self._last(x), space, *keeps
            new = self.rewrite.emit(node, node.target, *given, val=wide, **node.kwargs)
        if val.dim() == rank:
            self._settle(node, None, val, new)
        else:
            self.rewrite.replace(node, new)

    # -- layouts -------------------------------------------------------------------------------

    def _settle(
        self, node: Node, view: Node | None, laid: torch.Tensor, last: Node | None = None
    ) -> None:
        """Let what was computed so stand for a node.

        Args:
            node: the node.
            view: its values with the axes in their own order, where they lie so.
            laid: the fake value of those.
            last: its values with the channels last; made of `view` where it is left out.
        """
        rank = laid.dim()
        with self.rewrite.graph.inserting_before(node):
            if last is None:
                assert view is not None
                last = self._permuted(view, LAST[rank], self._compact(laid))
                self.views[last] = view
            # Whoever reads it as it was; its strides are eager's.
            back = self._permuted(last, FIRST[rank], node.meta["val"])
        self.last[back] = last
        self.settled.add(back)
        self.rewrite.replace(node, back)

    def _operand(self, node: Node, rank: int) -> Node:
        """An operand of a pointwise operator, beside tensors with their channels last."""
        val = node.meta["val"]
        if val.dim() == rank:
            return self._last(node)
        if val.dim() != rank - 1:
            return node
        whole = self.rewrite.emit(node, _aten.unsqueeze.default, node, 0)
        self.made.append(whole)
        return self._last(whole)

    def _last(self, node: Node) -> Node:
        if node not in self.last:
            val = node.meta["val"]
            self.last[node] = self._permuted(node, LAST[val.dim()], self._compact(val))
        return self.last[node]

    def _view(self, last: Node) -> Node:
        if last not in self.views:
            val = last.meta["val"]
            rank = val.dim()
            shape = [val.shape[axis] for axis in FIRST[rank]]
            laid = self.rewrite.like(val, shape, LAST[rank])
            self.views[last] = self._permuted(last, FIRST[rank], laid)
        return self.views[last]

    def _permuted(self, node: Node, order: Order, val: torch.Tensor) -> Node:
        new = self.rewrite.emit(node, _aten.permute.default, node, list(order), val=val)
        self.made.append(new)
        return new

    def _compact(self, val: torch.Tensor) -> torch.Tensor:
        """The fake value of a tensor's values with the channels last."""
        shape = [val.shape[axis] for axis in LAST[val.dim()]]
        return self.rewrite.like(val, shape, range(len(shape)))


def _casts(node: Node) -> bool:
    """Whether a node is a change of dtype and of nothing else."""
    return node.target is _aten._to_copy.default and set(node.kwargs) <= {"dtype"}


def _lies_last(val: torch.Tensor) -> bool:
    return dense_permutation(concrete(val.shape), concrete(val.stride())) == LAST[val.dim()]


def _follows(val: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a tensor beside others can be laid out as they are: any, but one for a last axis."""
    if val.dim() in (0, whole.dim(), whole.dim() - 1):
        return True
    return all(isinstance(size, int) and size == 1 for size in val.shape)
