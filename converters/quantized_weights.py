"""Products with weights of eight or four bits, which are unpacked in the product's kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fx2relax.int4 import layout

from .common import (
    Unsupported,
    cast,
    converts,
    dtype,
    op,
    product,
    reshape,
    shape,
    shape_expr,
    te,
    te_call,
    tirx,
)
from .opaque import is_large, local, loops, opaque, wide

aten = torch.ops.aten

# Rows of `x` whose sums stay in registers, beside the weights of one column of a block.
_ROWS = 4


@converts(aten._convert_weight_to_int4pack_for_cpu.default)
def convert_weight_to_int4pack_for_cpu(self: Any, innerKTiles: Any) -> Any:
    """Numbers from 0 to 15, two to a byte, in the order of this machine's kernels."""
    order = layout()
    rows, columns = shape(self)
    if order is None or not isinstance(rows, int) or rows % 16 or 0 in (rows, columns):
        raise Unsupported("an unknown order, or a size that it does not allow")
    if isinstance(columns, int) and columns % 2:
        raise Unsupported("an odd number of columns")
    parts = []
    for first, count, halves in order.blocks(rows):
        step, apart = (1, count // 2) if halves else (2, 1)

        def pack(
            w: Any, first: int = first, count: int = count, step: int = step, apart: int = apart
        ) -> Any:
            def byte(k: Any, i: Any) -> Any:
                low, high = (w(first + i * step + apart * n, k) & 15 for n in (0, 1))
                return tirx.Cast("uint8", low | (high << 4))

            return te.compute((w.shape[1], count // 2), byte, name="pack_int4")

        parts.append(reshape(te_call(pack, self), [product([columns, count // 2])]))
    whole = parts[0] if len(parts) == 1 else op.concat(parts, 0)
    return reshape(whole, [rows, columns // 2])


@converts(aten._weight_int4pack_mm_for_cpu.default)
def weight_int4pack_mm_for_cpu(self: Any, mat2: Any, qGroupSize: Any, qScaleAndZeros: Any) -> Any:
    """``self @ ((w - 8) * scale + zero).T``, a scale and a zero for so many columns of a row."""
    order = layout()
    (rows, depth), (columns, half) = shape(self), shape(mat2)
    kind = dtype(self)
    if order is None:
        raise Unsupported("an unknown order of four-bit weights")
    if not all(isinstance(s, int) for s in (depth, columns, half)) or 0 in (depth, columns):
        raise Unsupported("weights of unknown size")
    if depth != 2 * half or depth % qGroupSize or columns % 16:
        raise Unsupported("sizes that the order of four-bit weights does not allow")
    if shape(qScaleAndZeros) != [depth // qGroupSize, columns, 2]:
        raise Unsupported("scales and zeros of another shape")
    if rows == 0:
        return op.zeros(shape_expr([rows, columns]), kind)
    sizes = rows, depth, columns, qGroupSize
    height = min(_ROWS, rows) if isinstance(rows, int) else _ROWS

    def body(ins: Any, outs: Any, numbers: Any) -> None:
        x, weight, scales = ins
        rows = numbers[0]
        blocks = order.blocks(columns)
        whole = [b for b in blocks if b[2]] if order.halves else []
        if whole:
            with loops([len(whole)], parallel=0 if is_large(depth * columns) else None) as (n,):
                first = n * order.block
                _int4_block(
                    (x, weight, scales, outs[0]), rows, sizes, first, (order.block, True), height
                )
        for first, count, halves in blocks[len(whole) :]:
            tensors = (x, weight, scales, outs[0])
            _int4_block(tensors, rows, sizes, wide(first), (count, halves), height)

    operands = [cast(self, "float32"), mat2, cast(qScaleAndZeros, "float32")]
    made = opaque(
        "int4_product",
        body,
        operands,
        lambda numbers: [(product([numbers[0], columns]), "float32")],
        [rows],
    )
    return cast(reshape(made, [rows, columns]), kind)


def _int4_block(
    tensors: Sequence[Any],
    rows: Any,
    sizes: Sequence[Any],
    first: Any,
    block: tuple[int, bool],
    height: int,
) -> None:
    """The columns of the result that one block of the weight's rows gives."""
    x, weight, scales, out = tensors
    _, depth, columns, group = sizes
    count, halves = block
    lanes = count // 2
    # A column's scale and zero lie side by side.
    step, apart = (1, lanes) if halves else (2, 1)
    start = first * (depth // 2)
    tiles = tirx.floordiv(wide(rows) + (height - 1), wide(height))
    with loops([tiles]) as (tile,):
        at = [local("int64") for _ in range(height)]
        for r in range(height):
            at[r][0] = tirx.min(tile * height + r, wide(rows) - 1)
        sums = [[local("float32", lanes) for _ in range(2)] for _ in range(height)]
        for part in (p for row in sums for p in row):
            part[_ramp(0, lanes)] = _all(0.0, lanes)
        with loops([depth // group]) as (g,):
            scale = [local("float32", lanes) for _ in range(2)]
            zero = [local("float32", lanes) for _ in range(2)]
            with loops([lanes]) as (i,):
                for n in range(2):
                    column = first + i * step + apart * n
                    scale[n][i] = scales[(g * columns + column) * 2]
                    zero[n][i] = scales[(g * columns + column) * 2 + 1]
            with loops([group]) as (inner,):
                k = g * group + inner
                pair = weight[_ramp(start + k * lanes, lanes)]
                for n in range(2):
                    low = pair & tirx.Broadcast(tirx.const(15, "uint8"), lanes)
                    high = pair >> tirx.Broadcast(tirx.const(4, "uint8"), lanes)
                    number = tirx.Cast(f"int32x{lanes}", high if n else low)
                    number = number - tirx.Broadcast(tirx.const(8, "int32"), lanes)
                    number = tirx.Cast(f"float32x{lanes}", number)
                    value = number * scale[n][_ramp(0, lanes)] + zero[n][_ramp(0, lanes)]
                    for r in range(height):
                        factor = tirx.Broadcast(x[at[r][0] * depth + k], lanes)
                        part = sums[r][n]
                        part[_ramp(0, lanes)] = part[_ramp(0, lanes)] + factor * value
        for r in range(height):
            for n in range(2):
                place = at[r][0] * columns + first + apart * n
                out[tirx.Ramp(place, wide(step), lanes)] = sums[r][n][_ramp(0, lanes)]


@converts(aten._weight_int8pack_mm.default)
def weight_int8pack_mm(self: Any, mat2: Any, scales: Any) -> Any:
    """``(self @ mat2.T) * scales``; the pipeline has a kernel for weights that are bytes."""
    weight = op.permute_dims(op.astype(mat2, "float32"), [1, 0])
    made = op.matmul(cast(self, "float32"), weight)
    return cast(op.multiply(made, cast(scales, "float32")), dtype(self))


def _ramp(first: Any, lanes: int) -> Any:
    return tirx.Ramp(wide(first), wide(1), lanes)


def _all(value: float, lanes: int) -> Any:
    return tirx.Broadcast(tirx.const(value, "float32"), lanes)
