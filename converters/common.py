"""What converters share: TOPI and TE kernels, shapes, dtypes and constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fx2relax.casting import cast, scalar
from fx2relax.compat import (
    BlockBuilder,
    Expr,
    Var,
    dtype_of,
    is_prim_expr,
    op,
    relax,
    shape_expr,
    shape_values,
    te,
    tirx,
    topi,
)
from fx2relax.errors import Refused, Unsupported
from fx2relax.registry import Promotion, converts

__all__ = [
    "Expr",
    "Promotion",
    "Refused",
    "Unsupported",
    "cast",
    "compute_dtype",
    "const",
    "converts",
    "dtype",
    "emit",
    "is_float",
    "is_int",
    "ndim",
    "normalize_axis",
    "op",
    "pair",
    "product",
    "relax",
    "reshape",
    "scalar",
    "shape",
    "shape_expr",
    "te",
    "te_call",
    "tirx",
    "topi",
    "triple",
]


def emit(x: Any, name: str = "") -> Any:
    """Bind an expression to a variable, so that its type is known and it is computed once."""
    return x if isinstance(x, Var) else BlockBuilder.current().emit(x, name)


def te_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a TOPI or TE kernel: Relax tensors become TE tensors, the rest is passed as it is.

    ``te_call(topi.nn.dense, x, w)``
    """
    args = tuple(_bound(a) for a in args)
    return BlockBuilder.current().emit_te(function, *args, **kwargs)


def _bound(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_bound(v) for v in value]
    if isinstance(value, Expr) and not is_prim_expr(value):
        return emit(value)
    return value


def shape(x: Any) -> list[Any]:
    """The sizes of a Relax tensor: ints, and TIR expressions where they are symbolic."""
    values = shape_values(emit(x).ty)
    if values is None:
        raise Unsupported("a tensor of unknown shape")
    return values


def ndim(x: Any) -> int:
    """The rank of a Relax tensor."""
    return int(emit(x).ty.ndim)


def dtype(x: Any) -> str:
    """The dtype of a Relax tensor."""
    return dtype_of(emit(x))


def compute_dtype(kind: str) -> str:
    """What sums and products of a dtype are computed in: half precision in float32."""
    return "float32" if kind in ("float16", "bfloat16") else kind


def is_float(x: Any) -> bool:
    """Whether a Relax tensor holds floating-point numbers."""
    return "float" in dtype(x)


def is_int(x: Any) -> bool:
    """Whether a Relax tensor holds integers (bool is none)."""
    return "int" in dtype(x)


def const(value: bool | int | float, like: Any) -> Any:
    """A 0-d constant of the dtype of a Relax tensor."""
    return scalar(value, dtype(like))


def reshape(x: Any, sizes: Sequence[Any]) -> Any:
    """The same elements in another shape; no size may be -1."""
    x = emit(x)
    if any(isinstance(s, int) and s == 0 for s in sizes):  # to TVM's reshape 0 is a size to copy
        return op.zeros(shape_expr(sizes), dtype_of(x))
    return op.reshape(x, shape_expr(sizes))


def product(sizes: Sequence[Any]) -> Any:
    """The product of sizes; 1 for none, and 0 as soon as one is, which TVM may not see."""
    if any(isinstance(size, int) and size == 0 for size in sizes):
        return 0
    result: Any = 1
    for size in sizes:
        result = result * size
    return result


def normalize_axis(axis: int, rank: int) -> int:
    """A possibly negative axis as one from 0 to rank - 1; a 0-d tensor counts as 1-d."""
    return axis % max(rank, 1)


def _spread(value: Any, count: int) -> list[Any]:
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * count if len(values) == 1 else values


def pair(value: Any) -> list[Any]:
    """An int or a list of one or two as a list of two."""
    return _spread(value, 2)


def triple(value: Any) -> list[Any]:
    """An int or a list of one or three as a list of three."""
    return _spread(value, 3)
