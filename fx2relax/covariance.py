"""Covariance without a look at data.

PyTorch's asks whether the sum of weights is positive, which breaks the graph under every backend,
though it knows the answer where there are no weights.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import DispatchKey

aten = torch.ops.aten


def _checked(weights: Tensor, count: int, name: str, kind: str, right: bool) -> Tensor:
    torch._check(
        weights.dim() <= 1, lambda: f"cov(): expected {name} to have one or fewer dimensions"
    )
    torch._check(right, lambda: f"cov(): expected {name} to have {kind} dtype")
    torch._check(
        weights.numel() == count,
        lambda: f"cov(): expected {name} to have the same numel as there are observations",
    )
    if count:
        aten._assert_async.msg((weights >= 0).all(), f"cov(): {name} cannot be negative")
    return weights


def cov(
    self: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    """The covariance of the rows of a matrix, or the variance of a vector, of any dtype but bool.

    Raises:
        RuntimeError: more than two axes, bool, or weights of a wrong shape, dtype or sign.
    """
    torch._check(self.dim() <= 2, lambda: "cov(): expected input to have two or fewer dimensions")
    torch._check(self.dtype != torch.bool, lambda: "cov(): bool dtype is not supported for input")
    rows = self.reshape(1, -1) if self.dim() < 2 else self
    count = rows.shape[1]
    w = None
    if fweights is not None:
        whole = not fweights.dtype.is_floating_point and not fweights.dtype.is_complex
        w = _checked(
            fweights, count, "fweights", "integral", whole and fweights.dtype != torch.bool
        )
    if aweights is not None:
        given = _checked(
            aweights, count, "aweights", "floating point", aweights.dtype.is_floating_point
        )
        w = given if w is None else w * given
    total = torch.full((), count, device=rows.device) if w is None else w.sum()
    if w is not None:
        aten._assert_async.msg(total != 0, "cov(): weights sum to zero, can't be normalized")
    mean = (rows if w is None else rows * w).sum(1) / total
    if w is not None and aweights is not None and correction != 0:
        freedom = total - correction * (w * aweights).sum() / total
    else:
        freedom = total - correction
    centred = rows - mean.unsqueeze(1)
    weighted = centred if w is None else centred * w
    return (centred @ weighted.t().conj() / freedom.clamp(min=0)).squeeze()


for _key in (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd):
    aten.cov.default.py_kernels.setdefault(_key, cov)
aten.cov.default._dispatch_cache.clear()
