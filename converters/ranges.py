"""Tensors that count: ranges, evenly spaced numbers, identities, triangles."""

from __future__ import annotations

import math
from typing import Any

import torch

from fx2relax import dtypes
from fx2relax.compat import is_prim_expr

from .common import Unsupported, cast, converts, dtype, relax, te, te_call, tirx
from .creation import natural
from .elementwise import select

aten = torch.ops.aten
prims = torch.ops.prims


def _wide(value: Any, name: str) -> Any:
    """A number as a TIR scalar of a dtype."""
    if is_prim_expr(value):
        return value if str(value.ty.dtype) == name else tirx.Cast(name, value)
    return tirx.const(value, name)


def _count(start: Any, end: Any, step: Any) -> Any:
    """How many numbers a range holds, computed in doubles as eager does."""
    numbers = (start, end, step)
    if all(isinstance(v, (int, float)) for v in numbers):
        if all(isinstance(v, int) for v in numbers):
            return max(0, -((start - end) // step))
        return max(0, math.ceil((end - start) / step))
    if step == 1 and isinstance(start, float) and not isinstance(end, float):
        return end + math.ceil(-start)
    if step == 1 and isinstance(end, float) and not isinstance(start, float):
        return math.ceil(end) - start
    if any(isinstance(v, float) for v in numbers):
        raise Unsupported("a range of fractions with a symbolic bound")
    if not isinstance(step, int):
        raise Unsupported("a range with a symbolic step")
    if step > 0:
        return tirx.floordiv(end - start + (step - 1), tirx.const(step, "int64"))
    return tirx.floordiv(start - end + (-step - 1), tirx.const(-step, "int64"))


def _range(start: Any, end: Any, step: Any, given: Any) -> Any:
    name = dtypes.to_tvm(given) if given is not None else _natural(start, end, step)
    return counted(_count(start, end, step), start, step, name)


def _natural(*numbers: Any) -> str:
    kinds = [natural(v) for v in numbers]
    return next((k for k in kinds if "float" in k), "int64")


def counted(count: Any, start: Any, step: Any, name: str) -> Any:
    """``start + i * step``; of floats in double precision, rounded once."""
    wide = "float64" if "float" in name else "int64"
    if wide == "int64":
        start, step = _truncated(start), _truncated(step)

    def kernel() -> Any:
        def element(i: Any) -> Any:
            return _wide(start, wide) + tirx.Cast(wide, i) * _wide(step, wide)

        return te.compute((count,), element, name="arange")

    return cast(te_call(kernel, primfunc_name_hint="arange"), name)


def _truncated(value: Any) -> Any:
    return int(value) if isinstance(value, float) else value


@converts(aten.arange.default)
def arange(
    end: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Any:
    """0, 1, ... below `end`; integers if it is one."""
    return _range(0, end, 1, dtype)


@converts(aten.arange.start)
def arange_start(
    start: Any,
    end: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Any:
    """`start`, `start` + 1, ... below `end`."""
    return _range(start, end, 1, dtype)


@converts(aten.arange.start_step)
def arange_step(
    start: Any,
    end: Any,
    step: Any = 1,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Any:
    """`start`, `start` + `step`, ... before `end`."""
    return _range(start, end, step, dtype)


@converts(prims.iota.default)
def iota(
    length: Any, *, start: Any, step: Any, dtype: Any, device: Any, requires_grad: bool
) -> Any:
    """So many integers from `start` on."""
    return counted(length, start, step, dtypes.to_tvm(dtype))


@converts(aten.linspace.default)
def linspace(
    start: Any,
    end: Any,
    steps: int,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Any:
    """Evenly spaced numbers, counted from the nearer end, as eager counts them."""
    chosen = torch.get_default_dtype() if dtype is None else dtype
    name = dtypes.to_tvm(chosen)
    if "int" in name:
        # Eager steps in the integer dtype's own way; PyTorch's decomposition knows it.
        raise Unsupported("integers")
    wide = "float64" if name == "float64" else "float32"

    def kernel() -> Any:
        first, last = _wide(start, wide), _wide(end, wide)
        step = (last - first) / _wide(max(steps - 1, 1), wide)

        def element(i: Any) -> Any:
            up = first + step * tirx.Cast(wide, i)
            down = last - step * tirx.Cast(wide, steps - 1 - i)
            return select(i < steps // 2, up, down) if steps > 1 else first

        return te.compute((steps,), element, name="linspace")

    return cast(te_call(kernel, primfunc_name_hint="linspace"), name)


@converts(aten.eye.default)
def eye(
    n: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Any:
    """The identity matrix."""
    return eye_m(n, n, dtype=dtype)


@converts(aten.eye.m)
def eye_m(
    n: Any,
    m: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Any:
    """Ones on the diagonal of a matrix of zeros."""

    def kernel() -> Any:
        return te.compute((n, m), lambda i, j: tirx.EQ(i, j), name="eye")

    chosen = torch.get_default_dtype() if dtype is None else dtype
    return cast(te_call(kernel, primfunc_name_hint="eye"), dtypes.to_tvm(chosen))


def _triangle(x: Any, diagonal: Any, upper: bool) -> Any:
    zero = tirx.const(0, dtype(x))

    def kernel(t: Any, shift: Any) -> Any:
        def element(*at: Any) -> Any:
            offset = at[-1] - at[-2]
            kept = offset >= shift if upper else offset <= shift
            return select(kept, t(*at), zero)

        return te.compute(t.shape, element, name="triu" if upper else "tril")

    return te_call(kernel, x, diagonal, primfunc_name_hint="triu" if upper else "tril")


@converts(aten.tril.default)
def tril(self: Any, diagonal: Any = 0) -> Any:
    """The lower triangle; what is above it is 0, NaN included."""
    return _triangle(self, diagonal, upper=False)


@converts(aten.triu.default)
def triu(self: Any, diagonal: Any = 0) -> Any:
    """The upper triangle; what is below it is 0, NaN included."""
    return _triangle(self, diagonal, upper=True)


def _indices(row: int, col: int, offset: int, upper: bool, given: Any) -> Any:
    make = torch.triu_indices if upper else torch.tril_indices
    return cast(_literal(make(row, col, offset)), dtypes.to_tvm(given or torch.int64))


def _literal(tensor: torch.Tensor) -> Any:
    return relax.const(tensor.numpy(), dtypes.to_tvm(tensor.dtype))


@converts(aten.tril_indices.default)
def tril_indices(
    row: int,
    col: int,
    offset: int = 0,
    *,
    dtype: Any = torch.int64,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Any:
    """Where the lower triangle lies: rows, then columns."""
    return _indices(row, col, offset, False, dtype)


@converts(aten.triu_indices.default)
def triu_indices(
    row: int,
    col: int,
    offset: int = 0,
    *,
    dtype: Any = torch.int64,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Any:
    """Where the upper triangle lies: rows, then columns."""
    return _indices(row, col, offset, True, dtype)
