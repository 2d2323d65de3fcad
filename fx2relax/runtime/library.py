"""PyTorch's kernels as packed functions that write into a given output.

They are called from compiled programs in destination-passing style: operands, an optional bias,
settings, then the output. Operands and output are dense CPU tensors of float32, float64, float16 or
bfloat16; an operand of another dtype than the output is cast to it first. Importing this module
registers them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import tvm_ffi
from torch.utils.dlpack import from_dlpack

from fx2relax import recurrent_library

PREFIX = "fx2relax.library."
Tensor = torch.Tensor
# None of the tensors requires a gradient, so that neither no_grad nor inference_mode, which cost
# more than a small product, is needed around the calls.


def dense(x: Any) -> Tensor:
    """The tensor that a packed function was given, in the same memory."""
    # A capsule: the protocol's own way through torch.from_dlpack takes three times as long.
    return from_dlpack(x.__dlpack__())


def _matmul(left: bool, right: bool) -> Callable[..., None]:
    """``a @ b``, or ``a @ b + bias`` with a vector for the last axis; each may come transposed."""

    def matmul(*arguments: Any) -> None:
        a, b, *rest, out = [dense(x) for x in arguments]
        if a.dtype != out.dtype:
            a, b = a.to(out.dtype), b.to(out.dtype)
        if left:
            a = a.mT
        if right:
            b = b.mT
        if a.dim() == 1 and b.dim() == 2:  # matmul itself would resize `out`, with a warning
            a, out = a.unsqueeze(0), out.unsqueeze(0)
        rank, other = a.dim(), b.dim()
        if other == 2 and rank >= 2 and not left:
            flat = out.flatten(0, -2) if rank > 2 else out
            rows = a.flatten(0, -2) if rank > 2 else a
            if rest:
                torch.addmm(rest[0].to(out.dtype), rows, b, out=flat)
            else:
                torch.mm(rows, b, out=flat)
            return
        if rank == 3 and other == 3 and a.shape[0] == b.shape[0]:
            torch.bmm(a, b, out=out)
        else:
            torch.matmul(a, b, out=out)
        if rest:
            out.add_(rest[0])

    return matmul


def _convolution(*arguments: Any) -> None:
    """Settings: strides, padding, dilation and output padding per axis, groups, transposed."""
    *operands, settings, output = arguments
    x, weight, *rest = [dense(v) for v in operands]
    out = dense(output)
    if x.dtype != out.dtype:
        x, weight = x.to(out.dtype), weight.to(out.dtype)
        rest = [bias.to(out.dtype) for bias in rest]
    out.copy_(_convolve(x, weight, rest, settings))


def _convolution_nhwc(*arguments: Any) -> None:
    """The same settings; the first two operands and the output have their second axis last."""
    *operands, settings, output = arguments
    x, weight, *rest = [dense(v) for v in operands]
    out = dense(output).permute(0, 3, 1, 2)
    out.copy_(_convolve(x.permute(0, 3, 1, 2), weight.permute(0, 3, 1, 2), rest, settings))


def _new_convolution(*arguments: Any) -> Tensor:
    """As `_convolution`, returning its output: for operands of one dtype."""
    x, weight, *rest = [dense(v) for v in arguments[:-1]]
    return _convolve(x, weight, rest, arguments[-1]).contiguous()


def _new_convolution_nhwc(*arguments: Any) -> Tensor:
    x, weight, *rest = [dense(v) for v in arguments[:-1]]
    x, weight = x.permute(0, 3, 1, 2), weight.permute(0, 3, 1, 2)
    return _convolve(x, weight, rest, arguments[-1]).permute(0, 2, 3, 1).contiguous()


def _convolve(x: Tensor, weight: Tensor, rest: list[Tensor], settings: Any) -> Tensor:
    return torch.convolution(x, weight, rest[0] if rest else None, *_spread(x, settings))


def _spread(x: Tensor, settings: Any) -> tuple[Any, ...]:
    """The settings of a convolution of `x` as PyTorch's arguments, strides to groups."""
    values = [int(v) for v in settings]
    n = x.dim() - 2
    strides, padding, dilation, extra = (values[i * n : (i + 1) * n] for i in range(4))
    return strides, padding, dilation, bool(values[-1]), extra, values[-2]


def _weight_gradient(*arguments: Any) -> None:
    """Of a convolution of the first operand: the second is the gradient of its output.

    The same settings, then the sizes of the weight.
    """
    *operands, settings, _, output = arguments
    out = dense(output)
    x, gradient = [dense(v).to(out.dtype) for v in operands]
    out.copy_(_backward(x, gradient, settings, out))


def _new_weight_gradient(x: Any, gradient: Any, settings: Any, sizes: Any) -> Tensor:
    """As `_weight_gradient`, returning its output: for operands of one dtype."""
    data = dense(x)
    like = data.new_empty([int(s) for s in sizes])
    return _backward(data, dense(gradient), settings, like).contiguous()


def _backward(x: Tensor, gradient: Tensor, settings: Any, weight: Tensor) -> Tensor:
    """The gradient of a weight, of whose values nothing is read."""
    backward = torch.ops.aten.convolution_backward.default
    spread = _spread(x, settings)
    result: Tensor = backward(gradient, x, weight, None, *spread, [False, True, False])[1]
    return result


def _attention(*arguments: Any) -> None:
    """Queries, keys, values as (batch, sequence, heads, size), or heads first where a bit says so.

    Settings: the causal mask (0 none, 1 from the top left, 2 from the bottom right) and the bits.
    """
    *operands, settings, scale, output = arguments
    causal, order = (int(v) for v in settings)
    q, k, v, *rest = [dense(x) for x in operands]
    out = dense(output)
    q, k, v = (x if order >> n & 1 else x.transpose(1, 2) for n, x in enumerate((q, k, v)))
    mask = rest[0].to(q.dtype) if rest else None
    rows, columns = q.shape[2], k.shape[2]
    is_causal = causal == 1 and mask is None
    if causal and not is_causal:
        shift = columns - rows if causal == 2 else 0
        future = torch.ones(rows, columns, dtype=torch.bool).triu_(shift + 1)
        base = torch.zeros(rows, columns, dtype=q.dtype) if mask is None else mask
        mask = base.masked_fill(future, float("-inf"))
    result = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=is_causal,
        scale=float(scale),
        enable_gqa=k.shape[1] != q.shape[1],
    )
    out.copy_(result.transpose(1, 2))


def _new_lstm(*arguments: Any) -> tuple[Tensor, ...]:
    """One direction of an LSTM's layer: its outputs, the last state and the last cell's state.

    The operands of ``aten::mkldnn_rnn_layer``: (time, batch, features), two weights, two biases,
    two states (1, batch, size). Settings: whether it is reversed, whether the biases count.
    """
    *operands, settings = arguments
    reverse, biased = (bool(v) for v in settings)
    made = recurrent_library.called([dense(v) for v in operands], reverse, biased)
    return tuple(result.contiguous() for result in made)


#: The packed functions by name, without `PREFIX`.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        f"matmul_{'nt'[left]}{'nt'[right]}": _matmul(left, right)
        for left in (False, True)
        for right in (False, True)
    },
    # The native helper has kernels of its own for these: products of a few rows in float32.
    "rows_nn": _matmul(False, False),
    "rows_nt": _matmul(False, True),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    "conv2d_nhwc": _convolution_nhwc,
    **dict.fromkeys(("conv1d_weight", "conv2d_weight", "conv3d_weight"), _weight_gradient),
    # They return their output, which PyTorch has allocated, and copy nothing.
    **dict.fromkeys(("new_conv1d", "new_conv2d", "new_conv3d"), _new_convolution),
    "new_conv2d_nhwc": _new_convolution_nhwc,
    **{f"new_conv{n}d_weight": _new_weight_gradient for n in (1, 2, 3)},
    "attention": _attention,
    "new_lstm": _new_lstm,
}

for _name, _function in FUNCTIONS.items():
    tvm_ffi.register_global_func(PREFIX + _name, _function, override=True)
