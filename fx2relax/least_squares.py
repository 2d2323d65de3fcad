"""`torch.linalg.lstsq`: its shapes, which Dynamo takes to depend on data, and its decomposition.

They do so only where LAPACK's "gelss" or "gelsd" solve more equations than there are unknowns:
that stays in eager, and so do complex numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import DynamicOutputShapeException

__all__ = ["lstsq"]

aten = torch.ops.aten
Tensor = torch.Tensor
_SINGULAR = ("gelss", "gelsd")


def _is_vector(a: Tensor, b: Tensor) -> bool:
    return b.dim() == 1 or (a.dim() - 1 == b.dim() and b.shape == a.shape[:-1])


def _taken(a: Tensor, b: Tensor, driver: str | None) -> bool:
    """Whether the sizes of all results are known from those of the operands."""
    right = b.unsqueeze(-1) if _is_vector(a, b) else b
    known = all(isinstance(n, int) for n in (*a.shape, *right.shape))
    if not known or a.dim() < 2 or right.shape[:-1] != a.shape[:-1] or a.dtype != b.dtype:
        return False
    if 0 in (*a.shape, *right.shape) or driver not in (None, "gels", "gelsy", *_SINGULAR):
        return False
    real = a.device.type == "cpu" and not a.is_complex()
    return real and not (driver in _SINGULAR and a.shape[-2] > a.shape[-1])


def lstsq(
    a: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Tensor, ...]:
    """The solutions of least squares, or of least norm; their residuals, ranks, singular values."""
    if not _taken(a, b, driver):
        return NotImplemented  # type: ignore[no-any-return]
    vector = _is_vector(a, b)
    right = b.unsqueeze(-1) if vector else b
    rows, columns = a.shape[-2:]
    rank = a.new_empty([0], dtype=torch.int64)
    sizes = a.new_empty([0])
    nothing = (a == 0).all(-1, keepdim=True).all(-2, keepdim=True)  # LAPACK returns zeros
    if driver == "gels":
        x = _full_rank(a, right, nothing)
    else:
        left, values, turned = aten._linalg_svd(a)
        least = torch.finfo(a.dtype).eps
        if rcond is None:
            least = least * max(rows, columns)
        elif rcond >= 0:
            least = rcond
        counts = values > least * values[..., :1]
        rank = counts.sum(-1)
        inverse = torch.where(counts, values.reciprocal(), 0.0).unsqueeze(-1)
        x = torch.matmul(turned.mT, inverse * torch.matmul(left.mT, right))
        sizes = values if driver in _SINGULAR else sizes
    residuals = sizes.new_empty([0])
    if rows > columns:
        if driver == "gels":
            left_over = (right - torch.matmul(a, x)).square()
            residuals = torch.where(nothing, 0.0, left_over).sum(-2)
        # LAPACK writes the solution over the right side, column by column.
        x = torch.cat([x, x.new_zeros([*x.shape[:-2], rows - columns, x.shape[-1]])], -2)
    x = x.mT.contiguous().mT.narrow(-2, 0, columns)
    return (x.squeeze(-1) if vector else x), residuals, rank, sizes


def _full_rank(a: Tensor, right: Tensor, nothing: Tensor) -> Tensor:
    tall = a.shape[-2] >= a.shape[-1]
    q, r = aten.linalg_qr(a if tall else a.mT)
    lacking = (r.diagonal(0, -2, -1) == 0).any(-1) & ~nothing[..., 0, 0]
    info = lacking.to(torch.int32)
    aten._linalg_check_errors(info, "torch.linalg.lstsq", is_matrix=a.dim() == 2)
    if tall:
        x = aten.linalg_solve_triangular(r, torch.matmul(q.mT, right), upper=True)
    else:
        x = torch.matmul(q, aten.linalg_solve_triangular(r.mT, right, upper=False))
    return torch.where(nothing, 0.0, x)


def _shapes(
    mode: Any,
    function: Any,
    a: Tensor,
    b: Tensor,
    rcond: float | None = None,
    *,
    driver: str | None = None,
) -> tuple[Tensor, ...]:
    if not _taken(a, b, driver):
        raise DynamicOutputShapeException(function)
    right = b.unsqueeze(-1) if _is_vector(a, b) else b
    batch, (rows, columns), count = a.shape[:-2], a.shape[-2:], right.shape[-1]
    with mode:

        def empty(sizes: Any, dtype: torch.dtype = a.dtype) -> Tensor:
            return torch.empty(list(sizes), dtype=dtype, device=a.device)

        x = empty([*batch, count, max(rows, columns)]).mT.narrow(-2, 0, columns)
        x = x.squeeze(-1) if _is_vector(a, b) else x
        residuals = empty([*batch, count] if driver == "gels" and rows > columns else [0])
        rank = empty([0] if driver == "gels" else batch, torch.int64)
        sizes = empty([*batch, min(rows, columns)] if driver in _SINGULAR else [0])
        return x, residuals, rank, sizes


if aten.linalg_lstsq.default not in fake_impls.op_implementations_dict:
    fake_impls.register_op_impl(aten.linalg_lstsq.default)(_shapes)
