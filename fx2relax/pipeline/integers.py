"""Products of dequantised tensors as products of the integers that they were made of.

``dequantize(x) @ dequantize(w)`` is ``sum((x - zx) * (w - zw)) * sx * sw``: the sum is one of
integers, and exact, where float32 would round each step of it. The scale of `x` is one number, that
of the weight one for each output.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from tvm import relax
from tvm.relax.expr_functor import mutator

from ..compat import const_number
from .byte_products import OPAQUE, ByteRewriter, by_rows, count_of, turns
from .flow import dtype_of, known, name_of, sizes_of
from .integer_kernels import (
    Unit,
    Window,
    arranged,
    packed,
    product,
    row_totals,
    totals,
    unit_of,
)
from .lift import PACKS

_op = relax.op
# A longer sum of products of bytes might not fit 32 bits.
_LONGEST = 1 << 15
_LIMITS = {"uint8": (0, 255), "int8": (-128, 127)}
_PASSES = ("relax.reshape", "relax.permute_dims")


def use_integers(mod: Any, target: Any) -> Any:
    """Replace products and convolutions of dequantised tensors where the target has them.

    Args:
        mod: Relax functions in high-level operators; it is not changed.
        target: the target.
    """
    unit = unit_of(target)
    if unit is None:
        return mod
    return _Integers(mod, unit).rewritten()


@dataclass(frozen=True)
class _Quantised:
    """Integers, and the scale and zero point that make floats of them; no scale for integers."""

    values: Any
    scale: Any
    point: Any


def _plain(values: Any) -> _Quantised:
    return _Quantised(values, None, relax.const(0, "int32"))


@mutator
class _Integers(ByteRewriter):
    roots = ("relax.matmul", "relax.nn.conv2d")

    def __init__(self, mod: Any, unit: Unit) -> None:
        super().__init__(mod)
        self.unit = unit

    def made(self, call: Any) -> Any:
        """An integer product, if there is one."""
        kind = name_of(call), dtype_of(call)
        if kind == ("relax.matmul", "float32"):
            return self.matrix(call)
        if kind == ("relax.matmul", "int32"):
            return self.matrix(call, whole=True)
        return self.convolution(call) if kind == ("relax.nn.conv2d", "float32") else None

    def matrix(self, call: Any, whole: bool = False) -> Any:
        """``x @ w.T``, of floats or of `whole` numbers; `x` may have any number of axes."""
        left, right = call.args
        x = self.bytes(left, tuple(_LIMITS)) if whole else self.activation(left)
        w = self.weight(right, turned=True, whole=whole)
        sizes = sizes_of(left)
        if x is None or w is None or sizes is None or not isinstance(sizes[-1], int):
            return None
        outputs, depth = sizes_of(w.values) or (0, 0)
        if not 0 < depth <= _LONGEST or 0 in sizes or len(sizes) < 2:
            return None
        rows = count_of(sizes[:-1])
        words = -(-depth // 4)
        window = Window((1, 1), (words, words, words), (1, 1), (1, 1), (words, words), words)
        values = self.emit(_op.reshape(x.values, [rows, depth]))
        made = self.product(_Quantised(values, x.scale, x.point), w, window, rows, depth, [0] * 4)
        return _op.reshape(made, [*sizes[:-1], outputs])

    def convolution(self, call: Any) -> Any:
        """A plain convolution over two axes, of one group."""
        attrs = call.attrs
        layouts = [str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout)]
        if int(attrs.groups) != 1 or layouts != ["NCHW", "OIHW", "NCHW"]:
            return None
        x, w = self.activation(call.args[0]), self.weight(call.args[1], turned=False)
        if x is None or w is None:
            return None
        shape, kernel, result = (sizes_of(v) for v in (call.args[0], w.values, call))
        if shape is None or kernel is None or result is None:
            return None
        if not known([*shape[1:], *kernel, *result[1:]]) or 0 in (*shape, *kernel, *result):
            return None
        pads = [int(p) for p in attrs.padding]
        pads = pads if len(pads) == 4 else [*pads, *pads]
        depth = math.prod(kernel[1:])
        if depth > _LONGEST or (any(pads) and const_number(x.point) is None):
            return None
        words = -(-shape[1] // 4)
        line = (shape[3] + pads[1] + pads[3]) * words
        window = Window(
            (result[2], result[3]),
            ((shape[2] + pads[0] + pads[2]) * line, line, words),
            (int(attrs.strides[0]), int(attrs.strides[1])),
            (kernel[2], kernel[3]),
            (int(attrs.dilation[0]) * line, int(attrs.dilation[1]) * words),
            words,
        )
        rows = shape[0] * result[2] * result[3]
        made = self.product(x, w, window, rows, depth, pads)
        made = self.emit(_op.reshape(made, [shape[0], result[2], result[3], kernel[0]]))
        return _op.permute_dims(made, [0, 3, 1, 2])

    def product(
        self, x: _Quantised, w: _Quantised, window: Window, rows: Any, depth: int, pads: list[int]
    ) -> Any:
        """Rows by outputs, flat: float32, or int32 where there is no scale."""
        outputs = (sizes_of(w.values) or [0])[0]
        fill = const_number(x.point) if x.scale is not None else 0
        words = self.kernel(arranged, x.values, pads, int(fill or 0), hint="arrange_bytes")
        weight = self.kernel(
            packed, w.values, self.unit.columns, hint="pack_bytes", attrs={PACKS: 1}
        )
        words, weight = self.flat(words), self.flat(weight)
        summed = self.kernel(totals, w.values, hint="weight_totals", attrs={PACKS: 1})
        shifted = 128 if dtype_of(x.values) == "int8" else 0
        zero = self.emit(_op.add(x.point, relax.const(shifted, "int32")))
        corrections = self.emit(_op.multiply(summed, zero))
        multiply = functools.partial(product, window=window, unit=self.unit)
        named: dict[str, Any] = {"hint": "integer_product", "attrs": OPAQUE}
        if x.scale is None:
            return self.kernel(multiply, words, weight, corrections, [], rows, **named)
        points = self.emit(_op.broadcast_to(w.point, [outputs]))
        factors = self.emit(_op.multiply(w.scale, x.scale))
        factors = self.emit(_op.broadcast_to(factors, [outputs]))
        zero = self.emit(_op.reshape(zero, [1]))
        counted = functools.partial(row_totals, window=window, depth=depth)
        rest = self.kernel(counted, words, points, zero, rows, hint="row_totals", attrs=OPAQUE)
        floats = [points, rest, factors]
        return self.kernel(multiply, words, weight, corrections, floats, rows, **named)

    def emit(self, expr: Any) -> Any:
        return self.builder_.emit(expr)

    def kernel(
        self, function: Any, *args: Any, hint: str, attrs: dict[str, Any] | None = None
    ) -> Any:
        call = self.builder_.call_te(function, *args, primfunc_name_hint=hint, primfunc_attrs=attrs)
        return self.emit(call)

    def activation(self, x: Any) -> _Quantised | None:
        """What a tensor was dequantised from by one scale, moved as the tensor was."""
        moves = []
        value = self.value(x)
        while name_of(value) in _PASSES:
            moves.append(value)
            value = self.value(value.args[0])
        if name_of(value) != "relax.dequantize" or dtype_of(value) != "float32":
            return None
        values, scale, point = value.args
        limits = _LIMITS.get(dtype_of(values))
        if limits is None or sizes_of(scale) != [] or sizes_of(point) != []:
            return None
        constant = self.value(point)
        number = const_number(constant)
        if number is not None and not limits[0] <= number <= limits[1]:
            return None
        moved = self.visit_expr(values)
        for move in reversed(moves):
            if name_of(move) == "relax.reshape":
                moved = self.emit(_op.reshape(moved, self.visit_expr(move.args[1])))
            else:
                moved = self.emit(_op.permute_dims(moved, move.attrs.axes))
        if number is None:
            constant = self.emit(_op.astype(self.visit_expr(point), "int32"))
        return _Quantised(moved, self.visit_expr(scale), constant)

    def bytes(self, x: Any, kinds: tuple[str, ...]) -> _Quantised | None:
        """A tensor of bytes as it is."""
        fits = isinstance(x, relax.Var) and dtype_of(x) in kinds
        return _plain(self.visit_expr(x)) if fits else None

    def weight(self, x: Any, turned: bool, whole: bool = False) -> _Quantised | None:
        """What a weight of signed bytes was dequantised from, by a scale for each output."""
        if x not in self.flow.weights:
            return None
        value = self.value(x)
        if turned:
            if not turns(value):
                return None
            if whole:
                fits = known(sizes_of(value) or [None])
                return self.bytes(value.args[0], ("int8",)) if fits else None
            value = self.value(value.args[0])
        if name_of(value) != "relax.dequantize" or dtype_of(value) != "float32":
            return None
        values, scale, point = value.args
        sizes = sizes_of(values)
        if dtype_of(values) != "int8" or sizes is None or not known(sizes):
            return None
        if not by_rows(value):
            return None
        point = self.emit(_op.astype(self.visit_expr(point), "int32"))
        return _Quantised(self.visit_expr(values), self.visit_expr(scale), point)
