"""PyTorch's operators on matrices in terms of factorisations.

For a determinant PyTorch factorises the transpose of a matrix that lies in memory row by row, and
the gradients take that for granted. Only here, where strides are known, can the same be done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fx2relax.least_squares import lstsq

aten = torch.ops.aten
Tensor = torch.Tensor


def _solve_ex(
    a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, ...]:
    """The solution of ``a @ x = b``, or of ``x @ a = b``; `b` may be a batch of vectors."""
    vector = b.dim() == 1 or (a.dim() - 1 == b.dim() and b.shape == a.shape[:-1])
    factors, pivots, info = aten.linalg_lu_factor_ex(a)
    if check_errors:
        aten._linalg_check_errors(info, "torch.linalg.solve_ex", is_matrix=a.dim() == 2)
    right = b.unsqueeze(-1) if vector else b
    x = aten.linalg_lu_solve(factors, pivots, right, left=left)
    if vector:
        x = x.squeeze(-1).contiguous()
        if left and x.dim() > 1:  # eager lays the last two axes out as those of a matrix
            x = x.mT.contiguous().mT
    return x, factors, pivots, info


def _inv_ex(a: Tensor, *, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    """The inverse, as the solution for the identity."""
    factors, pivots, info = aten.linalg_lu_factor_ex(a)
    if check_errors:
        aten._linalg_check_errors(info, "linalg.inv_ex", is_matrix=a.dim() == 2)
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand(a.shape)
    return aten.linalg_lu_solve(factors, pivots, eye), info


def _sign(pivots: Tensor) -> Tensor:
    """The sign of the permutation: -1 for an odd number of exchanges."""
    places = torch.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype, device=pivots.device)
    return 1 - 2 * ((pivots != places).sum(-1) % 2)


def _factored(a: Tensor) -> tuple[Tensor, Tensor]:
    """The factors and pivots that eager has for a determinant."""
    turned = a.is_contiguous() and not a.is_complex()
    factors, pivots, _ = aten.linalg_lu_factor_ex(a.mT if turned else a)
    return factors, pivots


def _det(a: Tensor) -> tuple[Tensor, ...]:
    factors, pivots = _factored(a)
    diagonal = factors.diagonal(0, -2, -1)
    return _sign(pivots).to(a.dtype) * diagonal.prod(-1), factors, pivots


def _slogdet(a: Tensor) -> tuple[Tensor, ...]:
    """Sign and logarithm of the determinant."""
    factors, pivots = _factored(a)
    diagonal = factors.diagonal(0, -2, -1)
    signs = diagonal.sgn() if a.is_complex() else diagonal.sign()
    sign = _sign(pivots).to(a.dtype) * signs.prod(-1)
    return sign, diagonal.abs().log().sum(-1), factors, pivots


def _cut_off(
    a: Tensor, atol: Tensor | None, rtol: Tensor | None, sizes: Tensor
) -> tuple[Tensor, Tensor]:
    """Which singular values, given by their sizes, count, and a 0 of their dtype."""
    default = sizes.new_full((), torch.finfo(a.dtype).eps * max(a.shape[-2:]))
    if rtol is None:
        rtol = default if atol is None else torch.where(atol > 0, 0.0, default)
    if atol is None:
        atol = torch.zeros_like(rtol)
    largest = sizes.amax(-1, keepdim=True)
    limit = torch.maximum(atol.unsqueeze(-1), rtol.unsqueeze(-1) * largest)
    return sizes > limit, sizes.new_zeros(())


def _pinv(
    a: Tensor, *, atol: Tensor | None = None, rtol: Tensor | None = None, hermitian: bool = False
) -> Tensor:
    """The pseudo-inverse: singular values, or eigenvalues, above a limit are inverted."""
    if a.numel() == 0:
        return a.new_zeros([*a.shape[:-2], a.shape[-1], a.shape[-2]])
    if hermitian:
        values, left = aten._linalg_eigh(a)
        right = left
    else:
        left, values, turned = aten._linalg_svd(a)
        right = turned.mH
    counts, zero = _cut_off(a, atol, rtol, values.abs())
    inverse = torch.where(counts, values.reciprocal(), zero)
    return torch.matmul(right * inverse.unsqueeze(-2), left.mH)


RULES: dict[Any, Callable[..., Any]] = {
    aten._linalg_solve_ex.default: _solve_ex,
    aten.linalg_inv_ex.default: _inv_ex,
    aten._linalg_det.default: _det,
    aten._linalg_slogdet.default: _slogdet,
    aten.linalg_pinv.atol_rtol_tensor: _pinv,
    aten.linalg_lstsq.default: lstsq,
}


def _geqrf_shapes(a: Tensor) -> tuple[Tensor, Tensor]:
    """What `geqrf` returns, column by column as LAPACK writes it."""
    columns = torch.empty_like(a.mT, memory_format=torch.contiguous_format).mT
    return columns, a.new_empty([*a.shape[:-2], min(a.shape[-2:])])


# PyTorch 2.13 cannot trace this one operator of LAPACK's.
_library = torch.library.Library("aten", "IMPL", "Meta")
if not aten.geqrf.default.has_kernel_for_dispatch_key(torch._C.DispatchKey.Meta):
    _library.impl("geqrf", _geqrf_shapes)
