"""Complex tensors: TVM has no such dtype, so each is two real tensors, or one of pairs.

Between the kernels of a graph a complex tensor is its real and its imaginary part. At the graph's
boundary, and for calls of PyTorch, it is one real tensor of pairs ``(..., 2)``, as it lies in
PyTorch's memory (`torch.view_as_real`). Either form is made of the other where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fx2relax import dtypes
from fx2relax.casting import cast
from fx2relax.compat import (
    BlockBuilder,
    Expr,
    TensorType,
    const_int,
    dtype_of,
    from_torch,
    op,
    relax,
    shape_values,
    te,
    tirx,
)

__all__ = [
    "Complex",
    "as_complex",
    "constant",
    "held_dtype",
    "held_type",
    "is_complex",
    "part_dtype",
]

_PARTS = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


def is_complex(val: Any) -> bool:
    """Whether a value, fake or real, is a complex tensor that has a form here."""
    return isinstance(val, torch.Tensor) and val.layout is torch.strided and val.dtype in _PARTS


def part_dtype(dtype: torch.dtype) -> str:
    """``torch.complex64`` -> ``"float32"``."""
    return dtypes.to_tvm(_PARTS[dtype])


def held_dtype(dtype: torch.dtype) -> str:
    """The dtype of the Relax tensor, or tensors, that hold a tensor of this one."""
    return part_dtype(dtype) if dtype in _PARTS else dtypes.to_tvm(dtype)


def held_type(val: torch.Tensor, sizes: Sequence[Any] | None) -> Any:
    """The Relax type of a fake tensor of these sizes, or of its pairs; sizes may be unknown."""
    dtype, pairs = held_dtype(val.dtype), is_complex(val)
    if sizes is None:
        return TensorType(dtype=dtype, ndim=val.dim() + pairs)
    return TensorType([*sizes, 2] if pairs else list(sizes), dtype)


def constant(value: torch.Tensor) -> Any:
    """A tensor that is built into a graph, real or complex."""
    if is_complex(value):
        return Complex(pairs=relax.const(from_torch(torch.view_as_real(value.resolve_conj()))))
    return relax.const(from_torch(value))


class Complex:
    """A complex tensor of a graph: give both parts, or the pairs.

    Args:
        real, imag: Relax tensors of one shape and dtype.
        pairs: a Relax tensor whose last axis holds the real and the imaginary part.
    """

    def __init__(self, real: Any = None, imag: Any = None, *, pairs: Any = None) -> None:
        self._parts = None if real is None else (real, imag)
        self._pairs = pairs

    @property
    def held(self) -> list[Any]:
        """The Relax tensors that hold it."""
        return [self._pairs] if self._parts is None else list(self._parts)

    @property
    def has_parts(self) -> bool:
        """Whether it is held by its parts, and not by the pairs alone."""
        return self._parts is not None

    @property
    def parts(self) -> tuple[Any, Any]:
        """The real and the imaginary part."""
        if self._parts is None:
            self._parts = (_part(self._pairs, 0, "real"), _part(self._pairs, 1, "imag"))
        return self._parts

    @property
    def real(self) -> Any:
        """The real part."""
        return self.parts[0]

    @property
    def imag(self) -> Any:
        """The imaginary part."""
        return self.parts[1]

    @property
    def pairs(self) -> Any:
        """The tensor of pairs, as PyTorch holds it in memory."""
        if self._pairs is None:
            self._pairs = _paired(*self.parts)
        return self._pairs

    @property
    def dtype(self) -> str:
        """The dtype of the parts."""
        known = self._pairs if self._parts is None else self._parts[0]
        return dtype_of(BlockBuilder.current().normalize(known))

    @property
    def shape(self) -> list[Any]:
        """Its sizes."""
        builder = BlockBuilder.current()
        if self._parts is not None:
            return shape_values(builder.normalize(self._parts[0]).ty) or []
        return (shape_values(builder.normalize(self._pairs).ty) or [])[:-1]

    def conjugate(self) -> Complex:
        """The same with the imaginary part's sign turned."""
        return Complex(self.real, BlockBuilder.current().normalize(op.negative(self.imag)))

    def map(self, function: Callable[[Any], Any]) -> Complex:
        """The same done to either part."""
        return Complex(function(self.real), function(self.imag))


def as_complex(value: Any, dtype: str) -> Any:
    """A tensor or a number as a complex tensor, its parts of a dtype; anything else unchanged.

    The imaginary part of what is real is the constant 0, without axes.
    """
    if isinstance(value, Complex):
        return value if value.dtype == dtype else value.map(lambda part: cast(part, dtype))
    if isinstance(value, complex):
        return Complex(cast(value.real, dtype), cast(value.imag, dtype))
    if isinstance(value, (Expr, bool, int, float)):
        return Complex(cast(value, dtype), cast(0.0, dtype))
    return value


def _part(pairs: Any, which: int, name: str) -> Any:
    builder = BlockBuilder.current()

    def kernel(t: Any) -> Any:
        sizes = [const_int(s) for s in t.shape][:-1]
        return te.compute(sizes, lambda *at: t(*at, tirx.const(which, "int64")), name=name)

    return builder.emit_te(kernel, builder.emit(pairs), primfunc_name_hint=name)


def _paired(real: Any, imag: Any) -> Any:
    builder = BlockBuilder.current()

    def kernel(x: Any, y: Any) -> Any:
        sizes = [*(const_int(s) for s in x.shape), 2]
        return te.compute(
            sizes,
            lambda *at: tirx.Select(at[-1] == 0, x(*at[:-1]), y(*at[:-1])),
            name="pairs",
        )

    return builder.emit_te(
        kernel, builder.emit(real), builder.emit(imag), primfunc_name_hint="pairs"
    )
