"""Kernels with their tensors in another order of axes.

Any kernel computes the same with permuted tensors once its accesses are permuted alike; its loops
are put in the order in which they then walk the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import s_tir, tirx
from tvm.ir import Range

from .blocks import SPATIAL
from .tir import NotHandled, Rewriter, TensorLoad, rebuild_for, uses

Order = tuple[int, ...]
_SBlock, _Realize = s_tir.stmt.SBlock, s_tir.stmt.SBlockRealize


def permuted(func: Any, orders: Sequence[Order | None]) -> Any:
    """A kernel whose tensor parameters come with permuted axes.

    Args:
        func: a kernel made of blocks in perfect nests of loops, as TE makes them.
        orders: for each parameter its axes as they lie in memory, outermost first; None where it
            stays as it is. Temporaries of the rank of the last one follow it.

    Returns:
        the kernel, or None where it is not made that way.
    """
    body, last = func.body, orders[-1]
    if not isinstance(body, _Realize) or func.attrs.get("tirx.is_scheduled"):
        return None
    chosen = {p: o for p, o in zip(func.params, orders, strict=False) if o is not None}
    root = body.block
    for buffer in root.alloc_buffers:
        if last is not None and len(buffer.shape) == len(last):
            chosen[buffer] = last
    if any(len(b.shape) != len(o) or _laid_out(b) for b, o in chosen.items()):
        return None
    rewriter = _Permuter({b: (_like(b, o), o) for b, o in chosen.items()})
    try:
        block = rewriter.block(root)
    except NotHandled:
        return None
    params = [rewriter.buffer(p) for p in func.params]
    realize = _Realize(body.iter_values, body.predicate, block)
    return tirx.PrimFunc(params, realize, func.ret_type, func.attrs)


def sums(func: Any) -> bool:
    """Whether a block of a kernel has an axis other than those along its result."""
    pending = [func.body]
    while pending:
        node = pending.pop()
        if isinstance(node, _Realize):
            node = node.block
            if any(int(axis.iter_type) != SPATIAL for axis in node.iter_vars):
                return True
        pending += list(node.seq) if isinstance(node, tirx.SeqStmt) else []
        if hasattr(node, "body"):
            pending.append(node.body)
    return False


def inverse(order: Sequence[int]) -> Order:
    """The order that undoes another."""
    return tuple(sorted(range(len(order)), key=lambda n: order[n]))


def _laid_out(buffer: Any) -> bool:
    """Whether a buffer is more than its elements one after the other."""
    return bool(buffer.strides) or buffer.scope() not in ("", "global")


def _like(buffer: Any, order: Order) -> Any:
    shape = [buffer.shape[axis] for axis in order]
    # TVM fuses kernels whose buffers are equal, and those of its own have no such layout.
    return tirx.decl_buffer(shape, buffer.dtype, buffer.name, layout=None)


class _Permuter(Rewriter):
    """Permutes accesses; statements that hold blocks are rebuilt from the outside."""

    def __init__(self, buffers: dict[Any, tuple[Any, Order]]) -> None:
        self.buffers = buffers

    def buffer(self, old: Any) -> Any:
        """What stands for a buffer now."""
        return self.buffers[old][0] if old in self.buffers else old

    def expr(self, node: Any) -> Any:
        """Rewrite an expression; one that takes a buffer whole is not known."""
        if node in self.buffers:
            raise NotHandled("pointer")
        return super().expr(node)

    def leave(self, node: Any) -> Any:
        """A load from a permuted buffer."""
        if not isinstance(node, TensorLoad) or node.source not in self.buffers:
            return node
        new, order = self.buffers[node.source]
        return tirx.BufferLoad(new, [node.indices[axis] for axis in order])

    def visit_BufferStore(self, node: Any) -> Any:
        """A store to a permuted buffer."""
        node = self.store(node)
        if node.buffer not in self.buffers:
            return node
        new, order = self.buffers[node.buffer]
        return tirx.BufferStore(new, node.value, [node.indices[axis] for axis in order])

    def visit_SBlockRealize(self, node: Any) -> Any:
        """A block outside of any loop."""
        return _Realize(node.iter_values, node.predicate, self.block(node.block))

    def visit_For(self, node: Any) -> Any:
        """A nest of loops around one block, in the order of what the block writes."""
        loops = []
        while type(node).__name__ == "For":
            loops.append(node)
            node = node.body
        if not isinstance(node, _Realize):
            raise NotHandled("loops around more than a block")
        order = self.walk(node)
        if order is None:
            new = self.visit_SBlockRealize(node)
        else:
            values = [node.iter_values[n] for n in order]
            block = self.block(node.block, order)
            loops = _reordered(loops, values)
            new = _Realize(values, node.predicate, block)
        for loop in reversed(loops):
            new = rebuild_for(loop, loop.extent, new)
        return new

    def walk(self, realize: Any) -> list[int] | None:
        """The order of a block's axes in which it walks the permuted buffer that it writes."""
        block = realize.block
        written = [w for w in block.writes if w.source in self.buffers]
        if not written:
            return None
        _, order = self.buffers[written[0].source]
        indices = [written[0].region[axis].min for axis in order]
        axes = [i.var for i in block.iter_vars]
        places = [n for i in indices for n, var in enumerate(axes) if i.same_as(var)]
        first = list(dict.fromkeys(places))
        return first + [n for n in range(len(axes)) if n not in first]

    def block(self, block: Any, order: Sequence[int] | None = None) -> Any:
        """A block with its accesses permuted and its axes in an order."""
        axes = [block.iter_vars[n] for n in order or range(len(block.iter_vars))]
        if block.match_buffers:
            raise NotHandled("match_buffer")
        return _SBlock(
            axes,
            [self.region(r) for r in block.reads],
            [self.region(r) for r in block.writes],
            block.name_hint,
            self.stmt(block.body),
            None if block.init is None else self.stmt(block.init),
            [self.buffer(b) for b in block.alloc_buffers],
            [],
            block.annotations,
        )

    def region(self, region: Any) -> Any:
        """What a block says that it reads or writes."""
        ranges = [
            Range.from_min_extent(self.expr(r.min), self.expr(r.extent)) for r in region.region
        ]
        if region.source not in self.buffers:
            return tirx.BufferRegion(region.source, ranges)
        new, order = self.buffers[region.source]
        return tirx.BufferRegion(new, [ranges[axis] for axis in order])


def _reordered(loops: list[Any], values: list[Any]) -> list[Any]:
    """Loops in the order of the axes that they run along; others keep their place outside."""
    for loop in loops:
        if any(uses(other.extent, loop.loop_var) for other in loops):
            raise NotHandled("loops that depend on loops")
    inner = [loop for value in values for loop in loops if value.same_as(loop.loop_var)]
    return [loop for loop in loops if all(loop is not i for i in inner)] + inner
