"""Products with weights that are bytes: they stay bytes, and become floats in the product.

Otherwise `lift` would make floats of them once, four times as large.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from tvm import relax
from tvm.relax.expr_functor import mutator

from .byte_kernels import LANES, product
from .byte_products import OPAQUE, ByteRewriter, by_rows, count_of, turns
from .flow import dtype_of, known, name_of, sizes_of

_op = relax.op
_HALF = ("float16", "bfloat16")
_BYTES = ("int8", "uint8")


def use_byte_weights(mod: Any, target: Any) -> Any:
    """Replace products of a matrix of floats and a weight that is made of bytes.

    Args:
        mod: Relax functions in high-level operators, weights right of ``num_input``; it is not
            changed.
        target: the target.
    """
    return _ByteWeights(mod, int(target.attrs.get("num-cores", 0)) or 1).rewritten()


@dataclass(frozen=True)
class _Bytes:
    """Bytes, (columns, depth), and the scale and point of each group of a row, if they have any."""

    values: Any
    scale: Any = None
    point: Any = None
    groups: int = 1


@mutator
class _ByteWeights(ByteRewriter):
    def __init__(self, mod: Any, threads: int) -> None:
        super().__init__(mod)
        self.threads = threads

    def made(self, call: Any) -> Any:
        """A kernel for a product of floats, if there is one."""
        plain = name_of(call) == "relax.matmul" and dtype_of(call) == "float32"
        return self.product(call) if plain else None

    def product(self, call: Any) -> Any:
        """A kernel for a product; None where its weight is no matrix of bytes."""
        x, right = call.args
        sizes = sizes_of(x)
        weight = self.turned(right)
        if weight is None or sizes is None or len(sizes) < 2 or 0 in sizes:
            return None
        kind = dtype_of(x)
        if kind != "float32" and (kind not in _HALF or weight.scale is not None):
            return None  # bytes are exact in half precision, scaled ones are not
        columns, depth = sizes_of(weight.values) or (0, 0)
        each = depth // weight.groups
        if 0 in (columns, depth) or (weight.groups > 1 and each % LANES):
            return None
        rows = count_of(sizes[:-1])
        by = [] if weight.scale is None else [self.flat(weight.scale), self.flat(weight.point)]
        wide = self.visit_expr(x)
        flat = self.flat(
            wide if kind == "float32" else self.builder_.emit(_op.astype(wide, "float32"))
        )
        numbers: dict[str, Any] = {"columns": columns, "depth": depth, "groups": weight.groups}
        kernel = functools.partial(product, **numbers, threads=self.threads)
        made = self.builder_.call_te(
            kernel,
            *(flat, self.flat(weight.values), by, rows),
            primfunc_name_hint="byte_product",
            primfunc_attrs=OPAQUE,
        )
        return _op.reshape(self.builder_.emit(made), [*sizes[:-1], columns])

    def turned(self, right: Any) -> _Bytes | None:
        """What the right factor of a product is the transpose of."""
        if not isinstance(right, relax.Var) or right not in self.flow.weights:
            return None
        if len(sizes_of(right) or ()) != 2:
            return None
        value = self.value(right)
        if name_of(value) == "relax.astype":  # of the transpose
            inner = self.value(value.args[0])
            return self.plain(inner.args[0]) if turns(inner) else None
        return self.floats(value.args[0]) if turns(value) else None

    def floats(self, x: Any) -> _Bytes | None:
        """The bytes that floats, of whichever width, were made of."""
        value = self.value(x)
        name = name_of(value)
        if name == "relax.astype":
            return self.plain(value.args[0])
        if name == "relax.dequantize":
            return self.dequantised(value)
        return self.grouped(value) if name == "relax.reshape" else None

    def plain(self, x: Any) -> _Bytes | None:
        """Bytes as they are."""
        fits = dtype_of(x) in _BYTES and known(sizes_of(x) or [None])
        return _Bytes(self.visit_expr(x)) if fits else None

    def dequantised(self, value: Any) -> _Bytes | None:
        """Bytes with a scale for each row, or one for all."""
        x, scale, point = value.args
        found, rows = self.plain(x), (sizes_of(x) or [0])[0]
        if found is None or dtype_of(scale) != "float32":
            return None
        if not by_rows(value):
            return None
        scale, point = (
            self.builder_.emit(_op.broadcast_to(self.visit_expr(each), [rows]))
            for each in (scale, point)
        )
        point = self.builder_.emit(_op.astype(point, "float32"))
        return _Bytes(found.values, scale, point)

    def grouped(self, value: Any) -> _Bytes | None:
        """``((bytes in groups - points) * scales)`` as a matrix again."""
        scaled = self.value(value.args[0])
        if name_of(scaled) != "relax.multiply":
            return None
        moved, scale = self.value(scaled.args[0]), scaled.args[1]
        if name_of(moved) != "relax.subtract":
            return None
        floats, point = self.value(moved.args[0]), moved.args[1]
        if name_of(floats) != "relax.astype" or dtype_of(scale) != "float32":
            return None
        lined = self.value(floats.args[0])
        sizes, rows = sizes_of(scaled), sizes_of(value)
        if name_of(lined) != "relax.reshape" or sizes is None or rows is None or len(sizes) != 3:
            return None
        found = self.plain(lined.args[0])
        groups = [sizes[0], sizes[1], 1]
        if found is None or sizes_of(found.values) != rows or rows[0] != sizes[0]:
            return None
        if sizes_of(floats) != sizes or [sizes_of(scale), sizes_of(point)] != [groups, groups]:
            return None
        return _Bytes(found.values, self.visit_expr(scale), self.visit_expr(point), sizes[1])
