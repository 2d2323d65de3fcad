"""Sums of products in a kernel, and what is done to each sum: found, not yet scheduled.

A contraction is ``c[..] = sum over k of x[..] * y[..]`` with one axis `k`. Its other axes fall into
three groups: columns, on which only `y` depends and which end in the result's last axis; rows, on
which only `x` depends; and the batch, which is all the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import s_tir, tirx

from .blocks import REDUCTION, SPATIAL, Axis, Block, unit_step
from .tir import Call, NotHandled, Rewriter, TensorLoad, is_guard, uses

#: A block's annotation: this is a contraction to be computed in tiles.
CONTRACTION = "fx2relax.contraction"
#: A block's annotation: the number of columns of each panel into which `y` has been packed.
PANELS = "fx2relax.panels"
#: A block's annotation: `y` depends on so many neighbouring rows through their group alone.
GROUP = "fx2relax.group"
#: A block's annotation: along the columns `y` reads a window of so many taps, with this stride,
#: padding and dilation; the number of the tap is the remainder of `k`.
WINDOW = "fx2relax.window"
#: A block's annotation: the same numbers for the last two axes, first all taps, then all strides...
PLANE = "fx2relax.plane"


@dataclass
class Step:
    """A statement for each element of the result: ``target[..] = value``."""

    axes: list[Axis]
    target: Any
    indices: list[Any]
    value: Any


@dataclass
class Group:
    """An axis that is both batch and row: ``axis = number * size + member``."""

    axis: Any
    number: Axis
    member: Axis
    size: int


@dataclass
class Contraction:
    """One contraction and the steps that follow it.

    `batch`, `rows` and `columns` are its data-parallel axes, in the order of the result's indices;
    `panels` is how many columns a panel of a packed `y` has, 0 if it is not packed.
    """

    x: Any
    y: Any
    k: Axis
    batch: list[Axis]
    rows: list[Axis]
    columns: list[Axis]
    result: Any
    order: list[Any]
    steps: list[Step]
    panels: int
    dtype: str
    window: list[int] | None = None
    group: Group | None = None
    plane: list[int] | None = None


class _Replace(Rewriter):
    def __init__(self, places: dict[Any, Any], read: Any) -> None:
        self.places, self.read = places, read

    def leave(self, node: Any) -> Any:
        if isinstance(node, TensorLoad):
            return self.read(node)
        return self.places.get(node, node) if isinstance(node, tvm.ir.Var) else node


def find(func: Any) -> Contraction | None:
    """The contraction of a kernel that has been marked as one; None where there is none.

    Args:
        func: a kernel of blocks, none of them scheduled.
    """
    sch = s_tir.Schedule(tvm.IRModule({"main": func}), error_render_level="none")
    root = sch.get_sblock("root")
    blocks = [Block(sch, rv) for rv in sch.get_child_blocks(root)]
    marked = [n for n, b in enumerate(blocks) if CONTRACTION in sch.get(b.rv).annotations]
    if len(marked) != 1:
        return None
    place = marked[0]
    _inline_all(sch, blocks[:place])
    _inline_all(sch, blocks[place + 1 : -1])
    blocks = [Block(sch, rv) for rv in sch.get_child_blocks(root)]
    if CONTRACTION not in sch.get(blocks[0].rv).annotations or not all(b.regular for b in blocks):
        return None
    return _described(blocks[0], blocks[1:], dict(sch.get(blocks[0].rv).annotations))


def _inline_all(sch: Any, blocks: Sequence[Block]) -> None:
    for block in blocks:
        try:
            sch.compute_inline(block.rv)
        except Exception:
            continue  # an output, or read by what cannot take it: it is a step of its own


def _described(block: Block, after: Sequence[Block], marks: dict[str, Any]) -> Contraction | None:
    panels = int(marks.get(PANELS, 0))
    store = block.store
    assert store is not None
    product = store.value.b if isinstance(store.value, tirx.Add) else None
    if not isinstance(product, tirx.Mul):
        return None
    reduce = [a for a in block.axes if a.kind == REDUCTION]
    spatial = [a for a in block.axes if a.kind == SPATIAL]
    plain = len(store.indices) == len(spatial) and all(
        isinstance(i, tvm.ir.Var) and i.same_as(a.var)
        for i, a in zip(store.indices, spatial, strict=True)
    )
    if len(reduce) != 1 or not spatial or not plain:
        return None
    x, y = product.a, product.b
    if uses(x, spatial[-1].var):
        x, y = y, x
    if panels and x is product.b:
        return None
    columns: list[Axis] = []
    for axis in reversed(spatial):
        if uses(x, axis.var) or not uses(y, axis.var):
            break
        columns.insert(0, axis)
    rest = spatial[: len(spatial) - len(columns)]
    rows = [a for a in rest if not uses(y, a.var)]
    batch = [a for a in rest if uses(y, a.var)]
    group = None
    if GROUP in marks:
        group = _group(next(a for a in rest if uses(x, a.var)), int(marks[GROUP]))
        batch = [a for a in batch if not a.var.same_as(group.axis)] + [group.number]
        rows = [group.member]
    steps = [_step(b, store.buffer) for b in after]
    if not columns or not _loads_once(x) or None in steps:
        return None
    return Contraction(
        x,
        y,
        reduce[0],
        batch,
        rows,
        columns,
        store.buffer,
        [a.var for a in spatial],
        [s for s in steps if s is not None],
        panels,
        str(store.buffer.dtype),
        _numbers(marks, WINDOW),
        group,
        _numbers(marks, PLANE),
    )


def _numbers(marks: dict[str, Any], name: str) -> list[int] | None:
    return [int(n) for n in marks[name]] if name in marks else None


def _group(axis: Axis, size: int) -> Group:
    dtype = axis.var.ty.dtype
    number = Axis(tirx.Var("group", dtype), SPATIAL, tirx.const((axis.length or 0) // size, dtype))
    member = Axis(tirx.Var("member", dtype), SPATIAL, tirx.const(size, dtype))
    return Group(axis.var, number, member, size)


def split_guard(y: Any, var: Any) -> tuple[Any, list[Any]]:
    """What ``if_then_else(a and b and ..., value, 0)`` gives, and those of a, b, ... without `var`.

    Any other expression is given back as it is.
    """
    if not is_guard(y):
        return y, []
    parts: list[Any] = []

    def collect(condition: Any) -> None:
        if isinstance(condition, tirx.And):
            collect(condition.a)
            collect(condition.b)
        elif not uses(condition, var):
            parts.append(condition)

    collect(y.args[0])
    return y.args[1], parts


def evaluate(expr: Any, places: dict[Any, Any], read: Any = lambda load: load) -> Any:
    """An expression where variables have values, and ``read(load)`` in place of each load."""
    return _Replace(places, read).expr(expr)


def _step(block: Block, result: Any) -> Step | None:
    """A step whose axes are those of the result, each element read where it is written."""
    assert block.store is not None
    loads = block.loads_of(result)
    if block.reduces or not loads:
        return None
    return Step(block.axes, block.store.buffer, list(block.store.indices), block.store.value)


class _Count(Rewriter):
    def __init__(self) -> None:
        self.loads = 0
        self.others = 0

    def leave(self, node: Any) -> Any:
        self.loads += isinstance(node, TensorLoad)
        self.others += isinstance(node, (Call, tirx.Select, tirx.Let))
        return node


def _loads_once(x: Any) -> bool:
    """Whether a factor is one element of memory, perhaps converted."""
    count = _Count()
    try:
        count.expr(x)
    except NotHandled:
        return False
    return count.loads == 1 and not count.others


def runs_along(y: Any, var: Any) -> bool:
    """Whether consecutive values of a variable read consecutive elements."""
    found = Loads()
    found.expr(y)
    return bool(found.loads) and all(
        unit_step(load.indices[-1], var) and not any(uses(i, var) for i in load.indices[:-1])
        for load in found.loads
    )


class Loads(Rewriter):
    """Collects the elements of memory that an expression reads."""

    def __init__(self) -> None:
        self.loads: list[Any] = []

    def leave(self, node: Any) -> Any:
        if isinstance(node, TensorLoad):
            self.loads.append(node)
        return node


def last_load(y: Any) -> Any:
    """The element of memory that an expression reads."""
    found = Loads()
    found.expr(y)
    return found.loads[-1]
