"""Kernels that compute each element by statements: loops, and values that are kept in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fx2relax.compat import relax

from .common import emit, op, product, reshape, shape, shape_expr
from .indices import broadcast_sizes
from .opaque import local, loops, opaque

__all__ = ["each", "keep"]


def keep(value: Any) -> Any:
    """A TIR scalar computed here and once: inside a kernel of `each`, or of `opaque`."""
    held = local(str(value.ty.dtype))
    held[0] = value
    return held[0]


def each(
    name: str, body: Callable[..., Sequence[Any]], kinds: Sequence[str], *operands: Any
) -> list[Any]:
    """Tensors of some dtypes whose elements are what ``body(*elements)`` returns.

    Args:
        name: the kernel's name in the module.
        body: emits statements; takes and returns TIR scalars.
        kinds: a dtype for each of the results.
        operands: Relax tensors, broadcast as in PyTorch.
    """
    sizes = broadcast_sizes([shape(x) for x in operands])
    if any(isinstance(s, int) and s == 0 for s in sizes):
        return [op.zeros(shape_expr(sizes), kind) for kind in kinds]
    whole = [x if shape(x) == sizes else op.broadcast_to(x, shape_expr(sizes)) for x in operands]
    count = product(sizes)

    def statements(ins: Any, outs: Any, numbers: Any) -> None:
        with loops([numbers[0]], parallel=0) as (i,):
            results = body(*[keep(x[i]) for x in ins])
            for out, result in zip(outs, results, strict=True):
                out[i] = result

    flat = opaque(name, statements, whole, lambda n: [(n[0], kind) for kind in kinds], [count])
    if len(kinds) == 1:
        return [reshape(flat, sizes)]
    flat = emit(flat)
    return [reshape(emit(relax.TupleGetItem(flat, k)), sizes) for k in range(len(kinds))]
