"""What follows a contraction in its kernel, element by element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.sym import Analyzer

from .contractions import Contraction, Loads, Step, evaluate
from .tir import NotHandled

#: From the contraction's axes' values and the place of the sum in its tile to a statement.
Statement = Callable[[dict[Any, Any], Any], Any]


@dataclass
class Written:
    """The steps after a contraction, as makers of statements.

    `buffers` are tiles that hold what one step passes on to the next.
    """

    steps: list[Statement]
    buffers: list[Any]


def written(found: Contraction, params: Sequence[Any], sums: Any) -> Written | None:
    """The steps after a contraction; None where one reads another element than its own.

    Args:
        found: the contraction.
        params: the kernel's buffers: what is stored there stays.
        sums: the tile that holds the sums.
    """
    tiles: dict[Any, Any] = {found.result: sums}
    places = {found.result: list(found.order)}
    steps: list[Statement] = []
    buffers: list[Any] = []
    todo = found.steps
    whole = dict(zip(found.order, found.result.shape, strict=True))
    if any(p.same_as(found.result) for p in params):
        copy = Step([], found.result, list(found.order), tirx.BufferLoad(found.result, found.order))
        todo = [copy, *todo]
    for step in todo:
        found_axes = _own_axes(step, places, whole)
        if found_axes is None:
            return None
        own, inside = found_axes
        if any(p.same_as(step.target) for p in params):
            target = None
        else:
            target = tirx.decl_buffer(list(sums.shape), str(step.target.dtype), "passed")
            buffers.append(target)
        steps.append(_statement(step, own, inside, dict(tiles), target))
        if target is not None:
            tiles[step.target] = target
            order = [own.get(i) if isinstance(i, tvm.ir.Var) else None for i in step.indices]
            if None in order:
                return None
            places[step.target] = order
    return Written(steps, buffers) if steps else None


def _own_axes(
    step: Step, places: dict[Any, list[Any]], whole: dict[Any, Any]
) -> tuple[dict[Any, Any], dict[Any, Any]] | None:
    """From each axis of a step to that of the contraction which it stands for.

    Args:
        step: what follows.
        places: the contraction's axes by which each tile is indexed.
        whole: how long those are.

    Returns:
        that, and how far the step goes along those of the contraction's axes of which it reads a
        part (a slice from the start on).
    """
    search = Loads()
    try:
        search.expr(step.value)
    except NotHandled:
        return None
    known: list[tuple[Any, list[Any]]] = []
    for load in search.loads:
        order = next((o for b, o in places.items() if b.same_as(load.source)), None)
        if order is not None:
            known.append((load, order))
    if not known:
        return None
    own: dict[Any, Any] = {}
    inside: dict[Any, Any] = {}
    analyzer = Analyzer()
    firsts: list[Any] = []  # axes of which a step reads the first element alone
    extents = {a.var: a.extent for a in step.axes}
    for load, order in known:
        for index, var in zip(load.indices, order, strict=True):
            size = whole[var]
            if isinstance(index, tvm.ir.Var):
                if index in own and not own[index].same_as(var):
                    return None
                own[index] = var
                extent = extents.get(index, size)
            elif isinstance(index, tirx.IntImm) and int(index.value) == 0:
                if isinstance(size, tirx.IntImm) and int(size) == 1:
                    continue
                extent = tirx.const(1, index.ty.dtype)
                if not any(var.same_as(first) for first in firsts):
                    firsts.append(var)
            else:
                return None
            if analyzer.can_prove_equal(extent, size):
                continue
            if not analyzer.can_prove(extent <= size):
                return None  # it may be padded: there is more to write than the sums
            inside[var] = extent
    standing = [*own.values(), *firsts]
    if any(a.same_as(b) for n, a in enumerate(standing) for b in standing[:n]):
        return None
    free = [a for a in step.axes if a.var not in own]
    if any(a.length != 1 for a in free):
        return None
    return {**own, **{a.var: None for a in free}}, inside


def _statement(
    step: Step, own: dict[Any, Any], inside: dict[Any, Any], tiles: dict[Any, Any], target: Any
) -> Statement:
    def make(values: dict[Any, Any], place: Any) -> Any:
        zero = tirx.const(0, "int64")
        here = {axis: values[var] if var is not None else zero for axis, var in own.items()}

        def read(load: Any) -> Any:
            tile = next((t for b, t in tiles.items() if b.same_as(load.source)), None)
            return load if tile is None else tirx.BufferLoad(tile, [place])

        value = evaluate(step.value, here, read)
        indices = [evaluate(i, here) for i in step.indices]
        if target is not None:
            store = tirx.BufferStore(target, value, [place])
        else:
            store = tirx.BufferStore(step.target, value, indices)
        for var, extent in inside.items():
            store = tirx.IfThenElse(values[var] < extent, store, None)
        return store

    return make
