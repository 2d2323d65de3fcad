"""Layer, RMS, group and batch normalisation.

Training's batch normalisation and every backward pass are PyTorch's decompositions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fx2relax.casting import Statistic

from .common import cast, converts, dtype, emit, ndim, op, reshape, scalar, shape, shape_expr
from .reductions import full, variance_and_mean, wide

aten = torch.ops.aten


def _affine(values: Any, sizes: Sequence[Any], value: int, kind: str) -> Any:
    """The weight or bias in the computing dtype; where there is none, ones or zeros."""
    if values is not None:
        return cast(values, kind)
    return (op.ones if value else op.zeros)(shape_expr(sizes), kind)


def _rsqrt(variance: Any, eps: float) -> Any:
    return emit(op.rsqrt(op.add(variance, scalar(eps, dtype(variance)))))


def _scaled(x: Any, weight: Any, bias: Any) -> Any:
    """``x * weight + bias``, each of them optional."""
    if weight is not None:
        x = emit(op.multiply(x, cast(weight, dtype(x))))
    return x if bias is None else op.add(x, cast(bias, dtype(x)))


@converts(aten.native_layer_norm.default)
def layer_norm(
    input: Any, normalized_shape: Sequence[Any], weight: Any, bias: Any, eps: float
) -> Any:
    """Normalises the last axes; gives the mean and the reciprocal deviation as well.

    Half precision is computed in float32, weight and bias included, and rounded once.
    """
    kind, x = dtype(input), wide(input)
    rank, count = ndim(x), len(normalized_shape)
    dims = list(range(rank - count, rank))
    variance, mean = variance_and_mean(x, dims, 0, keepdim=True)
    rstd = _rsqrt(variance, eps)
    if dtype(x) == "float32" and not any(s == 0 for s in shape(x)):
        gamma = _affine(weight, normalized_shape, 1, "float32")
        beta = _affine(bias, normalized_shape, 0, "float32")
        out = op.nn.layer_norm(x, gamma, beta, axes=[d - rank for d in dims], epsilon=eps)
    else:
        out = _scaled(emit(op.multiply(op.subtract(x, mean), rstd)), weight, bias)
    return cast(out, kind), Statistic(mean), Statistic(rstd)


@converts(aten._fused_rms_norm.default)
def rms_norm(input: Any, normalized_shape: Sequence[int], weight: Any, eps: float | None) -> Any:
    """Divides by the root of the mean square; gives the reciprocal root in float32 as well.

    Without an `eps` it is the machine epsilon of the dtype that is computed in.
    """
    kind, x = dtype(input), wide(input)
    wide_kind = dtype(x)
    if eps is None:
        eps = torch.finfo(torch.float32 if wide_kind == "float32" else torch.float64).eps
    rank, count = ndim(x), len(normalized_shape)
    dims = list(range(rank - count, rank))
    rstd = _rsqrt(emit(op.mean(op.multiply(x, x), dims, keepdims=True)), eps)
    if wide_kind == "float32":
        gamma = _affine(weight, normalized_shape, 1, "float32")
        out = op.nn.rms_norm(x, gamma, axes=[d - rank for d in dims], epsilon=eps)
    else:
        out = _scaled(emit(op.multiply(x, rstd)), weight, None)
    return cast(out, kind), rstd


@converts(aten.native_group_norm.default)
def group_norm(
    input: Any, weight: Any, bias: Any, N: Any, C: Any, HxW: Any, group: int, eps: float
) -> Any:
    """Normalises each group of channels; gives means and reciprocal deviations as well.

    Not `R.nn.group_norm`: its variance is a difference of squares, which large means spoil.
    """
    kind, x = dtype(input), wide(input)
    sizes = shape(x)
    grouped = emit(reshape(x, [N, group, C // group, HxW]))
    variance, mean = variance_and_mean(grouped, [2, 3], 0, keepdim=True)
    rstd = _rsqrt(variance, eps)
    normal = emit(reshape(op.multiply(op.subtract(grouped, mean), rstd), sizes))
    per_channel = [C] + [1] * (len(sizes) - 2)
    out = _scaled(
        normal,
        None if weight is None else reshape(weight, per_channel),
        None if bias is None else reshape(bias, per_channel),
    )
    statistics = (reshape(v, [N, group]) for v in (mean, rstd))
    return tuple(cast(v, kind) for v in (out, *statistics))


@converts(aten._native_batch_norm_legit_no_training.default)
def batch_norm_inference(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
) -> Any:
    """Normalises each channel by the running statistics; the two saved ones are empty."""
    kind, x = dtype(input), wide(input)
    wide_kind = dtype(x)
    channels = [shape(x)[1]]
    normal = op.nn.batch_norm(
        x,
        _affine(weight, channels, 1, wide_kind),
        _affine(bias, channels, 0, wide_kind),
        cast(running_mean, wide_kind),
        cast(running_var, wide_kind),
        axis=1,
        epsilon=eps,
        center=bias is not None,
        scale=weight is not None,
        training=False,
    )
    nothing = full([0], 0, kind)
    return cast(normal[0], kind), nothing, nothing


@converts(aten._weight_norm_interface_backward.default)
def weight_norm_backward(
    grad_w: Any, saved_v: Any, saved_g: Any, saved_norms: Any, dim: int
) -> tuple[Any, Any]:
    """Gradients of a weight's direction and of its length along one axis; sums in float32."""
    kind = dtype(saved_v)
    grad, v, g, norms = (wide(x) for x in (grad_w, saved_v, saved_g, saved_norms))
    others = [axis for axis in range(ndim(v)) if axis != dim % ndim(v)]
    along = emit(op.sum(op.multiply(grad, v), axis=others, keepdims=True))
    grad_g = emit(op.divide(along, norms))
    unit = op.divide(v, norms)
    grad_v = op.multiply(op.divide(g, norms), op.subtract(grad, op.multiply(unit, grad_g)))
    return cast(emit(grad_v), kind), cast(grad_g, dtype(saved_g))
