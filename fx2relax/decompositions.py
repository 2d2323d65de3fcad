"""What PyTorch decomposes for us before the importer sees it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._decomp.decompositions import pw_cast_for_opmath
from torch._prims_common import (
    compute_elementwise_output_logical_to_physical_perm,
    suggest_memory_format,
)
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from fx2relax import chunked_losses, linear_algebra, quantized, strided
from fx2relax import upsampling as upsampling  # before the first trace, which it keeps whole
from fx2relax.eager_kernels import asking
from fx2relax.layouts import inverse
from fx2relax.registry import lookup
from fx2relax.whole import keep

aten = torch.ops.aten

# PyTorch has a decomposition for these, and running the operator in PyTorch is better.
_DRAWS = "the decomposition draws other numbers than eager"
_WRITES = "the decomposition writes into views, which AOTAutograd refuses"
_NEVER: dict[Any, str] = {
    aten.bernoulli.p: _DRAWS,
    aten.bernoulli.default: _DRAWS,
    aten.cauchy.default: _DRAWS,
    aten.exponential.default: _DRAWS,
    aten.geometric.default: _DRAWS,
    aten.log_normal.default: _DRAWS,
    aten.normal_functional.default: _DRAWS,
    aten.rrelu_with_noise.default: _DRAWS,
    aten.rrelu_with_noise_functional.default: _DRAWS,
    aten.uniform.default: _DRAWS,
    aten.complex.default: _WRITES,
    aten.polar.default: _WRITES,
}


def _native_dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[Any, Any]:
    """Dropout with the mask that eager draws: bernoulli over the input's own shape and dtype.

    The mask is drawn as the input lies in memory, where `bernoulli.p` draws a compact tensor.
    """
    if not train or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return x * 0, torch.zeros_like(x, dtype=torch.bool)
    order, _ = compute_elementwise_output_logical_to_physical_perm(x)
    mask = aten.bernoulli.p(x.permute(order), 1 - p).permute(inverse(order))
    return x * (mask * (1.0 / (1.0 - p))), mask.to(torch.bool)


def _native_dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """As its operands lie: PyTorch's own is compact."""
    return grad * mask * scale


def _trilinear(
    i1: torch.Tensor,
    i2: torch.Tensor,
    i3: torch.Tensor,
    expand1: list[int],
    expand2: list[int],
    expand3: list[int],
    sumdim: list[int],
    unroll_dim: int = 1,
) -> torch.Tensor:
    """A sum of products of three tensors, by two matrix products."""
    axes = range(i1.dim() + len(expand1))
    operands = [
        (t, [axis for axis in axes if axis not in expanded])
        for t, expanded in ((i1, expand1), (i2, expand2), (i3, expand3))
    ]
    result: torch.Tensor = torch.einsum(
        *[part for operand in operands for part in operand],
        [axis for axis in axes if axis not in sumdim],
    )
    return result.contiguous()


def _max_unpool(
    x: torch.Tensor, indices: torch.Tensor, output_size: list[int], *_: Any
) -> torch.Tensor:
    """Zeros with elements put back; an index outside of the output is an error."""
    lead, rank = x.shape[: x.dim() - len(output_size)], len(output_size)
    flat = x.new_zeros([*lead, math.prod(output_size)])
    flat = flat.scatter(-1, indices.flatten(-rank), x.flatten(-rank))
    result = flat.reshape([*lead, *output_size])
    return result.contiguous(memory_format=suggest_memory_format(x)) if rank == 2 else result


def _channel_shuffle(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Channels dealt out again, group by group; the result lies in memory as the input does."""
    batch, channels, *space = x.shape
    split = x.reshape(batch, groups, channels // groups, *space)
    shuffled = split.transpose(1, 2).reshape(x.shape)
    return shuffled.clone(memory_format=suggest_memory_format(x))


def _im2col(
    x: torch.Tensor,
    kernel_size: list[int],
    dilation: list[int],
    padding: list[int],
    stride: list[int],
) -> torch.Tensor:
    """By windows instead of PyTorch's tables of indices; compact, of a batch of one as well."""
    (rows, columns), batched = padding, x.dim() == 4
    windows = functional.pad(x if batched else x.unsqueeze(0), (columns, columns, rows, rows))
    for axis, size, step, start in zip((2, 3), kernel_size, dilation, stride, strict=True):
        windows = windows.unfold(axis, (size - 1) * step + 1, start)[..., ::step]
    result = windows.permute(0, 1, 4, 5, 2, 3).flatten(4).flatten(1, 3).contiguous()
    return result if batched else result.squeeze(0)


def _celu(x: torch.Tensor, alpha: float = 1.0) -> Any:
    """As eager computes it: what is zero stays zero whatever `alpha` is."""
    return NotImplemented if alpha == 0 else aten.elu.default(x, alpha, 1, 1 / alpha)


def _ends(eps: float, dtype: torch.dtype) -> tuple[float, float]:
    """``eps`` and ``1 - eps`` in a dtype's own arithmetic."""
    with _disable_current_modes():
        low = torch.tensor(eps, dtype=dtype)
        return low.item(), (1 - low).item()


def _logit(x: torch.Tensor, eps: float | None = None) -> torch.Tensor:
    """Eager's bounds are numbers of the tensor's dtype."""
    if eps is not None:
        x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
        low, high = _ends(eps, x.dtype)
        x = torch.where(x < low, low, torch.where(x > high, high, x))
    result: torch.Tensor = decomposition_table[aten.logit.default](x)
    return result


def _logit_backward(grad: torch.Tensor, x: torch.Tensor, eps: float | None = None) -> torch.Tensor:
    if eps is None:
        outer: torch.Tensor = decomposition_table[aten.logit_backward.default](grad, x)
        return outer
    low, high = _ends(eps, x.dtype)
    return torch.where((x >= low) & (x <= high), _logit_slope(grad, x), 0.0)


@pw_cast_for_opmath
def _logit_slope(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return grad / (x * (1.0 - x))


@pw_cast_for_opmath
def _smooth_l1_loss_backward(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int, beta: float
) -> torch.Tensor:
    """What is neither below nor above is between, NaN as well."""
    far = x - target
    slope = torch.where(far <= -beta, -1.0, torch.where(far >= beta, 1.0, far / beta))
    return (1.0 / x.numel() if reduction == 1 else 1.0) * grad * slope


def _soft_margin_loss(x: torch.Tensor, target: torch.Tensor, reduction: int = 1) -> Any:
    """Every step in the inputs' dtype: in float16 what exceeds its range is infinite."""
    loss = (-x * target).exp().log1p()  # laid out as `x` is
    return loss.mean() if reduction == 1 else loss.sum() if reduction == 2 else loss


def _soft_margin_loss_backward(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int
) -> torch.Tensor:
    z = (-target * x).exp()
    norm = 1.0 / x.numel() if reduction == 1 else 1.0
    return target * z * -norm / (z + 1) * grad


def _encoder_layer(
    src: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: torch.Tensor,
    norm_bias_1: torch.Tensor,
    norm_weight_2: torch.Tensor,
    norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor,
    ffn_bias_1: torch.Tensor,
    ffn_weight_2: torch.Tensor,
    ffn_bias_2: torch.Tensor,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> torch.Tensor:
    """The fast path of `nn.TransformerEncoderLayer`; what is not 0 in the mask is hidden.

    A row that is hidden throughout gives NaN.
    """

    def attend(x: torch.Tensor) -> torch.Tensor:
        heads = functional.linear(x, qkv_weight, qkv_bias).unflatten(-1, (3, num_heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        if mask is None:
            result = functional.scaled_dot_product_attention(q, k, v)
        else:
            hidden = (mask[:, None, None] if mask_type == 1 else mask).to(torch.bool)
            scores = (q / math.sqrt(q.shape[-1])) @ k.mT
            result = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
        return functional.linear(result.transpose(1, 2).flatten(2), proj_weight, proj_bias)

    def feed(x: torch.Tensor) -> torch.Tensor:
        hidden = functional.linear(x, ffn_weight_1, ffn_bias_1)
        hidden = functional.gelu(hidden) if use_gelu else hidden.relu()
        return functional.linear(hidden, ffn_weight_2, ffn_bias_2)

    def first(x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, [embed_dim], norm_weight_1, norm_bias_1, eps)

    def second(x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, [embed_dim], norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attend(first(src))
        return x + feed(second(x))
    x = first(src + attend(src))
    return second(x + feed(x))


_OURS: dict[Any, Callable[..., Any]] = {
    **chunked_losses.rules(),
    **linear_algebra.RULES,
    **quantized.RULES,
    aten.celu.default: _celu,
    aten.logit.default: _logit,
    aten.logit_backward.default: _logit_backward,
    aten.smooth_l1_loss_backward.default: _smooth_l1_loss_backward,
    aten.soft_margin_loss.default: _soft_margin_loss,
    aten.soft_margin_loss_backward.default: _soft_margin_loss_backward,
    aten.native_dropout.default: _native_dropout,
    aten.native_dropout_backward.default: _native_dropout_backward,
    aten._trilinear.default: _trilinear,
    aten._transformer_encoder_layer_fwd.default: _encoder_layer,
    aten.im2col.default: _im2col,
    aten.channel_shuffle.default: _channel_shuffle,
    aten.native_channel_shuffle.default: _channel_shuffle,
    aten.max_unpool2d.default: _max_unpool,
    aten.max_unpool3d.default: _max_unpool,
}


def rule(target: Any) -> Callable[..., Any] | None:
    """The decomposition of one overload, if it has one that is worth having."""
    if target in _OURS:
        return _OURS[target]
    if not isinstance(target, torch._ops.OpOverload) or target in _NEVER:
        return None
    if target._schema.is_mutable:  # functionalisation has taken these apart already
        return None
    found = decomposition_table.get(target)
    return None if found is None or _only_renames(target) else found


def asking_table(*, halves: bool = True) -> dict[Any, Callable[..., Any]]:
    """`table`, less the calls that eager refuses; for `halves` see `eager_kernels.refusal`."""
    return {target: asking(target, rule, halves=halves) for target, rule in table().items()}


def table() -> dict[Any, Callable[..., Any]]:
    """The decompositions in force: of overloads that have no converter, and of some layouts."""
    found = dict(strided.RULES)
    for target in [*decomposition_table, *_OURS]:
        decomposition = rule(target) if lookup(target) is None else None
        if decomposition is not None:
            layout = found.get(target)
            found[target] = _either(layout, decomposition) if layout else decomposition
    return found


def _either(first: Callable[..., Any], second: Callable[..., Any]) -> Callable[..., Any]:
    """A rule, and another for what it declines."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        result = first(*args, **kwargs)
        return second(*args, **kwargs) if result is NotImplemented else result

    return rule


def _only_renames(target: Any) -> bool:
    """Whether the decomposition is one `prims` operator that has no converter either."""
    name = target._schema.name.split("::")[-1].removeprefix("special_")
    prim = getattr(torch.ops.prims, name, None)
    return prim is not None and lookup(prim.default) is None


def _one_hot(x: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Compact, as eager's is, and with eager's errors: PyTorch's own keeps the strides of `x`."""
    if num_classes == -1:
        num_classes = int(x.max().item()) + 1
    if x.numel():
        aten._assert_async.msg((x >= 0).all(), "Class values must be non-negative.")
        aten._assert_async.msg(
            (x < num_classes).all(), "Class values must be smaller than num_classes."
        )
    classes = torch.arange(num_classes, dtype=x.dtype, device=x.device)
    return (x.unsqueeze(-1) == classes).to(torch.int64).contiguous()


def _max_pool1d(
    x: torch.Tensor,
    kernel_size: list[int],
    stride: list[int] | tuple[int, ...] = (),
    padding: list[int] | int = 0,
    dilation: list[int] | int = 1,
    ceil_mode: bool = False,
) -> torch.Tensor:
    """Eager has a kernel of its own where no gradient is wanted, whose results are compact."""
    result: torch.Tensor = aten.max_pool1d_with_indices.default(
        x, kernel_size, stride, padding, dilation, ceil_mode
    )[0]
    return result if x.requires_grad and torch.is_grad_enabled() else result.contiguous()


def _alpha_dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Draws into memory in its order; of a mask that is not compact the trace forgets that."""
    order, _ = compute_elementwise_output_logical_to_physical_perm(x)
    whole = aten.alpha_dropout.default._op_dk
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    if not train or p == 0 or order == list(range(x.dim())):
        return whole(key, x, p, train)  # type: ignore[no-any-return]
    result: torch.Tensor = whole(key, x.permute(order), p, train)
    return result.permute(inverse(order))


keep(aten.max_pool1d.default, _max_pool1d)
keep(aten.alpha_dropout.default, _alpha_dropout)
keep(aten.one_hot.default, _one_hot)
keep(aten.multilabel_margin_loss_forward.default)  # PyTorch's is wrong for halves and 0-d
