"""Sorting, top-k and searching in sorted sequences.

Floating-point numbers are ordered by integer keys, so that NaN is the largest of all, zeros of
either sign are equal, and TVM's stable sorts apply.
"""

from __future__ import annotations

from typing import Any

import torch

from fx2relax import dtypes
from fx2relax.compat import IRBuilder, T
from fx2relax.elements import Elements

from .common import (
    Unsupported,
    cast,
    converts,
    dtype,
    emit,
    is_float,
    ndim,
    normalize_axis,
    op,
    product,
    reshape,
    scalar,
    shape,
    te,
    te_call,
    tirx,
)
from .indexing import gather
from .reductions import full, wide

aten = torch.ops.aten


def _te_order_key(x: Any) -> Any:
    bits, kind = (64, "int64") if str(x.dtype) == "float64" else (32, "int32")

    def key(*index: Any) -> Any:
        value = x(*index)
        plain = tirx.Select(value == 0, tirx.const(0, x.dtype), value)
        word = tirx.reinterpret(kind, plain)
        # Negative numbers count down from their sign bit: turn the others of their bits round.
        ordered = word ^ ((word >> tirx.const(bits - 1, kind)) & tirx.max_value(kind))
        return tirx.Select(tirx.isnan(value), tirx.max_value(kind), ordered)

    return te.compute(x.shape, key, name="order_key")


def order_key(x: Any) -> Any:
    """Integers in the order of the elements, equal where they are."""
    if is_float(x):
        return te_call(_te_order_key, wide(x))
    kind = dtype(x)
    if kind == "uint64":
        raise Unsupported("uint64")
    return x if kind in ("int32", "int64") else cast(x, "int64" if kind == "uint32" else "int32")


def _trivial(x: Any) -> bool:
    return ndim(x) == 0 or any(s == 0 for s in shape(x))


def sorted_with_index(x: Any, dim: int, descending: bool) -> tuple[Any, Any]:
    """The elements in order, equal ones in their old order, and where they were."""
    if _trivial(x):
        return x, full(shape(x), 0, "int64")
    axis = normalize_axis(dim, ndim(x))
    index = emit(op.argsort(order_key(x), axis=axis, descending=descending, dtype="int64"))
    return op.gather_elements(x, index, axis), index


@converts(aten.sort.default)
def sort(self: Any, dim: int = -1, descending: bool = False) -> Any:
    """Stable; NaN is the largest."""
    return sorted_with_index(self, dim, descending)


@converts(aten.sort.stable)
def sort_stable(self: Any, *, stable: bool | None, dim: int = -1, descending: bool = False) -> Any:
    """`sort`, which is stable in any case."""
    return sorted_with_index(self, dim, descending)


@converts(aten.topk.default)
def topk(self: Any, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """The first of equals come first; sorted in any case; NaN is the largest."""
    axis = normalize_axis(dim, ndim(self))
    sizes = shape(self)
    if not sizes and k == 1:
        return self, full([], 0, "int64")
    sizes = [k if i == axis else s for i, s in enumerate(sizes)] if sizes else [0]
    if any(s == 0 for s in sizes):
        return full(sizes, 0, dtype(self)), full(sizes, 0, "int64")
    if not isinstance(k, int):
        values, index = sorted_with_index(self, axis, largest)
        return _first(values, axis, k), _first(index, axis, k)
    keys = order_key(self)
    index = emit(op.topk(keys, k=k, axis=axis, ret_type="indices", largest=largest, dtype="int64"))
    return op.gather_elements(self, index, axis), index


def _first(x: Any, axis: int, k: Any) -> Any:
    return op.strided_slice(x, [axis], [0], [k])


# -- searching ---------------------------------------------------------------------------------


def _te_search(sequence: Any, values: Any, right: bool, kind: str) -> Any:
    """Binary search for each value in the sequence, or in its own row of sequences."""
    length = sequence.shape[-1]
    is_float = "float" in str(values.dtype)

    def body(sequence_buffer: Any, values_buffer: Any, result_buffer: Any) -> Any:
        with IRBuilder() as builder:
            ordered = Elements(sequence_buffer)
            wanted = Elements(values_buffer)
            result = Elements(result_buffer)
            with T.parallel(0, product(values.shape)) as i:
                row = 0 if len(sequence.shape) == 1 else i // values.shape[-1] * length
                low = Elements(T.decl_buffer([1], "int64", scope="local"))
                high = Elements(T.decl_buffer([1], "int64", scope="local"))
                low[0], high[0] = tirx.const(0, "int64"), tirx.Cast("int64", length)
                with T.While(low[0] < high[0]):
                    middle = low[0] + ((high[0] - low[0]) >> tirx.const(1, "int64"))
                    here, value = ordered[row + middle], wanted[i]
                    before = here <= value if right else here < value
                    if is_float:  # NaN is beyond everything
                        before = tirx.any(before, tirx.isnan(here), tirx.isnan(value))
                    with T.If(before):
                        with T.Then():
                            low[0] = middle + tirx.const(1, "int64")
                        with T.Else():
                            high[0] = middle
                result[i] = tirx.Cast(kind, low[0])
            return builder.get()

    return te.extern(
        [values.shape],
        [sequence, values],
        lambda ins, outs: body(ins[0], ins[1], outs[0]),
        dtype=[kind],
        name="searchsorted",
        tag="searchsorted",
    )


def _common_dtype(*values: Any) -> str:
    """What PyTorch compares tensors and numbers in."""
    operands = [
        v
        if isinstance(v, (bool, int, float))
        else torch.empty([0] * ndim(v), dtype=dtypes.to_torch(dtype(v)), device="meta")
        for v in values
    ]
    kind = dtypes.to_tvm(torch.result_type(*operands))  # type: ignore[arg-type]
    return {"float16": "float32", "bfloat16": "float32", "bool": "uint8"}.get(kind, kind)


def _search(sequence: Any, values: Any, out_int32: bool, right: bool) -> Any:
    common = _common_dtype(sequence, values)
    kind = "int32" if out_int32 else "int64"
    sequence, values = emit(cast(sequence, common)), emit(cast(values, common))
    sizes = shape(values)
    if any(s == 0 for s in sizes) or any(s == 0 for s in shape(sequence)):
        return full(sizes, 0, kind)
    if ndim(sequence) == 0:
        sequence = reshape(sequence, [1])
    flat = values if sizes else reshape(values, [1])
    found = te_call(
        lambda s, v: _te_search(s, v, right, kind),
        sequence,
        flat,
        primfunc_name_hint="searchsorted",
    )
    return found if sizes else reshape(found, [])


@converts(aten.searchsorted.Tensor)
def searchsorted(
    sorted_sequence: Any,
    self: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """Where each value would be inserted, on the left of equals by default; NaN at the end."""
    if sorter is not None and not _trivial(sorted_sequence):
        sorted_sequence = gather(sorted_sequence, -1, sorter)
    return _search(sorted_sequence, self, out_int32, right or side == "right")


@converts(aten.searchsorted.Scalar)
def searchsorted_scalar(
    sorted_sequence: Any,
    self: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """`searchsorted` of a number."""
    if sorter is not None and not _trivial(sorted_sequence):
        sorted_sequence = gather(sorted_sequence, -1, sorter)
    return _search_number(sorted_sequence, self, out_int32, right or side == "right")


def _search_number(sequence: Any, value: Any, out_int32: bool, right: bool) -> Any:
    if not isinstance(value, (bool, int, float)):
        raise Unsupported("a symbolic number")
    value = scalar(value, _common_dtype(sequence, value))
    return _search(sequence, value, out_int32, right)


@converts(aten.bucketize.Tensor)
def bucketize(self: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    """`searchsorted` with its tensors the other way round."""
    return _search(boundaries, self, out_int32, right)


@converts(aten.bucketize.Scalar)
def bucketize_scalar(
    self: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False
) -> Any:
    """`bucketize` of a number."""
    return _search_number(boundaries, self, out_int32, right)
