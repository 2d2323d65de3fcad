"""The arithmetic of quantised tensors as PyTorch writes it, where sizes and values are unknown.

PyTorch's own functions ask tensors for their values (`item`, comparisons); here are those that a
trace can take apart. Each step is rounded as eager rounds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.ao.quantization.fx import _decomposed  # registers torch.ops.quantized_decomposed

#: PyTorch's operators on quantised tensors, which the import above registers.
operators: Any = torch.ops.quantized_decomposed


def _extremes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest element, 0 among them."""
    low, high = torch.aminmax(x)
    zero = torch.zeros_like(low)
    return torch.min(low, zero), torch.max(high, zero)


def _choose_qparams(
    x: torch.Tensor, quant_min: int, quant_max: int, eps: float, dtype: torch.dtype
) -> Any:
    if quant_min >= quant_max:
        return NotImplemented
    low, high = _extremes(x)
    scale = (high - low) / float(quant_max - quant_min)
    scale = torch.max(scale, torch.full((1,), eps, device=x.device))
    zero_point = quant_min - torch.round(low / scale).to(torch.int)
    zero_point = torch.clamp(zero_point, quant_min, quant_max)
    return scale.to(torch.double), zero_point.to(torch.int64)


def _choose_qparams_symmetric(
    x: torch.Tensor, quant_min: int, quant_max: int, eps: float, dtype: torch.dtype
) -> Any:
    if quant_min >= quant_max:
        return NotImplemented
    low, high = _extremes(x)
    scale = torch.max(-low, high) / (float(quant_max - quant_min) / 2)
    scale = torch.max(scale, torch.full((1,), eps, device=x.device))
    middle = 128 if dtype is torch.uint8 else 0
    return scale.to(torch.double), torch.full((1,), middle, dtype=torch.int64, device=x.device)


def _grouped(x: torch.Tensor, scales: torch.Tensor, group_size: int) -> int | None:
    """The size of the groups in which a matrix is quantised; None for what eager refuses."""
    if group_size <= 1 or x.dim() != 2:
        return None
    if group_size > x.shape[-1] and scales.shape[-1] == 1:
        group_size = x.shape[-1]
    return group_size if x.shape[-1] % group_size == 0 else None


def _quantize_per_channel_group(
    x: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
    group_size: int = 128,
) -> Any:
    size = _grouped(x, scales, group_size)
    if size is None:
        return NotImplemented
    groups = x.reshape(-1, size)
    torch.ops.aten._assert_async.msg(~torch.isnan(groups).any(), "to_quant must not contain NaNs")
    scaled = groups.mul(1.0 / scales.reshape(-1, 1)).add(zero_points.reshape(-1, 1))
    return scaled.round().clamp(quant_min, quant_max).to(dtype).reshape(x.shape)


#: For `decompositions`; the rest of the namespace has converters.
RULES: dict[Any, Callable[..., Any]] = {
    operators.choose_qparams.tensor: _choose_qparams,
    operators.choose_qparams_symmetric.tensor: _choose_qparams_symmetric,
    operators.choose_qparams_per_token_asymmetric.default: (
        _decomposed._choose_qparams_per_token_asymmetric_impl
    ),
    operators.quantize_per_channel.default: _decomposed.quantize_per_channel,
    operators.quantize_per_token.default: _decomposed.quantize_per_token,
    operators.dequantize_per_token.default: _decomposed.dequantize_per_token,
    operators.quantize_per_channel_group.default: _quantize_per_channel_group,
    operators.dequantize_per_channel_group.default: _decomposed.dequantize_per_channel_group,
}
