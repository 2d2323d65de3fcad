"""BatchNorm over frozen statistics as a part of the convolution before it, on a GPU.

`pipeline.batch_norm` does so for convolutions that are Relax's; here they are PyTorch's calls. The
weights are scaled in float32, once, and rounded to their own dtype.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from fx2relax.gpu_epilogues import DTYPES
from fx2relax.gpu_graphs import Rewrite, only_user, target_of, val_of

Node = torch.fx.Node
_aten = torch.ops.aten
_NORM = _aten._native_batch_norm_legit_no_training.default


def fold_norms(rewrite: Rewrite) -> None:
    """Fold each BatchNorm that alone reads a convolution with frozen weights into it.

    ``bn(conv(x, w) + b)`` is ``conv(x, w * s) + ((b - mean) * s + beta)`` with
    ``s = gamma / sqrt(variance + eps)``.
    """
    for norm in rewrite.nodes(_NORM):
        convolution = norm.args[0]
        read = [user for user in norm.users if user.users]
        alone = all(u.target is operator.getitem and u.args[1] == 0 for u in read)
        if isinstance(convolution, Node) and read and alone and _folds(rewrite, convolution, norm):
            for result in set(norm.users) - set(read):
                rewrite.drop(result)
            for result in read:
                _fold(rewrite, convolution, norm, result)


def _folds(rewrite: Rewrite, convolution: Node, norm: Node) -> bool:
    if target_of(convolution) is not _aten.convolution.default:
        return False
    val, parts = val_of(convolution), [*convolution.args[1:3], *norm.args[1:5]]
    known = all(p is None or p in rewrite.weights for p in parts)
    if val is None or val.dtype not in DTYPES or convolution.args[6] or not known:
        return False
    mean, variance = norm.args[3:5]
    return only_user(convolution) is norm and mean is not None and variance is not None


def _fold(rewrite: Rewrite, convolution: Node, norm: Node, result: Node) -> None:
    weight, bias = convolution.args[1:3]
    _, gamma, beta, mean, variance, _, eps = norm.args
    kind, rank = val_of(weight).dtype, val_of(weight).dim()  # type: ignore[union-attr]

    def emit(target: Any, *args: Any, **kwargs: Any) -> Node:
        return rewrite.emit(norm, target, *args, **kwargs)

    def single(x: Any) -> Node:
        val = val_of(x)
        assert val is not None
        if val.dtype is torch.float32:
            return x  # type: ignore[no-any-return]
        return emit(_aten._to_copy.default, x, dtype=torch.float32)

    def rounded(x: Node) -> Node:
        return x if kind is torch.float32 else emit(_aten._to_copy.default, x, dtype=kind)

    with rewrite.graph.inserting_before(result):
        scale = emit(_aten.rsqrt.default, emit(_aten.add.Scalar, single(variance), eps))
        if gamma is not None:
            scale = emit(_aten.mul.Tensor, scale, single(gamma))
        shift = single(mean)
        if bias is None:
            shift = emit(_aten.neg.default, shift)
        else:
            shift = emit(_aten.sub.Tensor, single(bias), shift)
        shift = emit(_aten.mul.Tensor, shift, scale)
        if beta is not None:
            shift = emit(_aten.add.Tensor, shift, single(beta))
        along = emit(_aten.view.default, scale, [-1, *[1] * (rank - 1)])
        scaled = rounded(emit(_aten.mul.Tensor, single(weight), along))
        new = rewrite.emit(
            convolution,
            convolution.target,
            convolution.args[0],
            scaled,
            rounded(shift),
            *convolution.args[3:],
            val=result.meta["val"],
        )
    rewrite.replace(result, new)
