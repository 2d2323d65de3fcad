"""A product of floats and of bytes, which become floats in registers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import te, tirx

from fx2relax.compat import IRBuilder, T
from fx2relax.elements import Elements

from .loops import worth
from .nests import INDEX, number

#: Elements that are multiplied at a time; a group of weights is a multiple of it.
LANES = 16
# Rows and columns of a tile, whose sums stay in registers.
_ROWS, _COLUMNS = 4, 4


def product(
    x: Any,
    weight: Any,
    by: Sequence[Any],
    rows: Any,
    *,
    columns: int,
    depth: int,
    groups: int,
    threads: int,
) -> Any:
    """``x @ ((weight - point) * scale).T`` in float32, flat.

    Args:
        x: rows by depth, flat.
        weight: columns by depth, flat.
        by: scale and point, columns by groups, flat; empty for the bytes themselves.
        rows: how many rows `x` has.
        columns: how many rows the weight has.
        depth: how many elements a row has.
        groups: how many groups a row of the weight has, each with a scale and a point of its own.
        threads: how many there are.
    """
    height = min(_ROWS, rows) if isinstance(rows, int) else _ROWS
    width = min(_COLUMNS, columns)

    def tile(given: Sequence[Any], out: Any, row: Any, column: Any) -> None:
        x, weight, *by = given
        left = _places([tirx.min(row + n, number(rows) - 1) for n in range(height)])
        right = _places([tirx.min(column + n, number(columns - 1)) for n in range(width)])
        sums = [[_local("float32", LANES) for _ in right] for _ in left]
        for total in (t for part in sums for t in part):
            total[_ramp(0)] = _all(tirx.const(0.0, "float32"))
        each = depth // groups
        with (
            T.serial(number(0), number(groups)) as g,
            T.serial(number(0), number(each // LANES)) as part,
        ):
            k = g * each + part * LANES
            values = [_value(weight[_ramp(j[0] * depth + k)], by, j, g, groups) for j in right]
            for i, along in zip(left, sums, strict=True):
                factor = x[_ramp(i[0] * depth + k)]
                for value, total in zip(values, along, strict=True):
                    total[_ramp(0)] = total[_ramp(0)] + factor * value
        for i, along in zip(left, sums, strict=True):
            for j, total in zip(right, along, strict=True):
                whole = _local("float32", 1)
                whole[0] = _sum([total[n] for n in range(LANES)])
                if each % LANES:
                    with T.serial(number(0), number(each % LANES)) as n:
                        k = n + each // LANES * LANES
                        value = tirx.Cast("float32", weight[j[0] * depth + k])
                        if by:
                            value = (value - by[1][j[0]]) * by[0][j[0]]
                        whole[0] += x[i[0] * depth + k] * value
                out[i[0] * columns + j[0]] = whole[0]

    work = rows * columns * depth if isinstance(rows, int) else math.inf
    shared = T.parallel if worth(work, threads) else T.serial

    def body(*buffers: Any) -> None:
        *given, out = buffers
        tiles = tirx.floordiv(number(rows) + (height - 1), number(height))
        with (
            shared(number(0), number(-(-columns // width))) as column,
            T.serial(number(0), tiles) as row,
        ):
            tile(given, out, row * height, column * width)

    def statements(given: Any, made: Any) -> Any:
        with IRBuilder() as builder:
            with T.attr(0, "fx2relax", "statements"):
                body(*(Elements(b) for b in (*given, *made)))
            return builder.get().body

    operands = [x, weight, *by]
    return te.extern([(rows * columns,)], operands, statements, dtype=["float32"], name="bytes")


def _value(byte: Any, by: Sequence[Any], column: Any, group: Any, groups: int) -> Any:
    value = tirx.Cast(f"float32x{LANES}", byte)
    if not by:
        return value
    scale, point = (_all(each[column[0] * groups + group]) for each in by)
    return (value - point) * scale


def _sum(terms: list[Any]) -> Any:
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def _places(values: Sequence[Any]) -> list[Any]:
    made = [_local(INDEX, 1) for _ in values]
    for place, value in zip(made, values, strict=True):
        place[0] = value
    return made


def _local(kind: str, count: int) -> Any:
    return Elements(T.alloc_buffer((count,), kind, scope="global"))


def _ramp(first: Any) -> Any:
    return tirx.Ramp(number(first), number(1), LANES)


def _all(value: Any) -> Any:
    return tirx.Broadcast(value, LANES)
