"""Convolutions of one to three axes and their gradients, the gradients as convolutions too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fx2relax.bounds import wide

from .common import (
    Unsupported,
    converts,
    dtype,
    emit,
    ndim,
    op,
    reshape,
    shape,
    shape_expr,
    te,
    te_call,
    tirx,
)

aten = torch.ops.aten

_CONV = {1: op.nn.conv1d, 2: op.nn.conv2d, 3: op.nn.conv3d}
_CONV_TRANSPOSE = {1: op.nn.conv1d_transpose, 2: op.nn.conv2d_transpose, 3: op.nn.conv3d_transpose}
_DATA = {1: "NCW", 2: "NCHW", 3: "NCDHW"}
_KERNEL = {1: "OIW", 2: "OIHW", 3: "OIDHW"}
_KERNEL_TRANSPOSE = {1: "IOW", 2: "IOHW", 3: "IODHW"}


@converts(aten.convolution.default)
def convolution(
    input: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """A batched convolution, plain or transposed; half precision is summed in float32."""
    axes = _axes(input)
    stride, padding, dilation = (_each(v, axes) for v in (stride, padding, dilation))
    if transposed:
        sizes = [
            (n - 1) * s - 2 * p + d * (k - 1) + extra + 1
            for n, k, s, p, d, extra in zip(
                shape(input)[2:],
                shape(weight)[2:],
                stride,
                padding,
                dilation,
                _each(output_padding, axes),
                strict=True,
            )
        ]
        result = conv_transpose(input, weight, sizes, stride, padding, dilation, groups)
    else:
        result = conv(input, weight, stride, padding, dilation, groups)
    result = emit(result)
    if bias is not None:
        bias = bias if dtype(bias) == dtype(result) else op.astype(bias, dtype(result))
        result = emit(op.add(result, reshape(bias, [1, shape(bias)[0], *[1] * axes])))
    return result if dtype(result) == dtype(input) else op.astype(result, dtype(input))


@converts(aten.convolution_backward.default)
def convolution_backward(
    grad_output: Any,
    input: Any,
    weight: Any,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Any, Any, Any]:
    """Gradients of the input, the weight and the bias; None for those not wanted."""
    axes = _axes(input)
    stride, padding, dilation = (_each(v, axes) for v in (stride, padding, dilation))
    results: list[Any] = [None, None, None]
    if 0 in (*shape(input), *shape(grad_output)):
        wanted = [shape(input), shape(weight), [shape(grad_output)[1]]]
        results = [
            op.zeros(shape_expr(sizes), dtype(input)) if mask else None
            for sizes, mask in zip(wanted, output_mask, strict=True)
        ]
        return results[0], results[1], results[2]
    if output_mask[0] and transposed:
        whole = emit(conv(grad_output, weight, stride, padding, dilation, groups))
        results[0] = _head(whole, shape(input)[2:])
    elif output_mask[0]:
        sizes = shape(input)[2:]
        results[0] = conv_transpose(grad_output, weight, sizes, stride, padding, dilation, groups)
    if output_mask[1]:
        data, kernel = (grad_output, input) if transposed else (input, grad_output)
        results[1] = _weight_gradient(
            data, kernel, shape(weight), stride, padding, dilation, groups
        )
    if output_mask[2]:
        summed = grad_output
        if dtype(summed) in ("float16", "bfloat16"):
            summed = op.astype(summed, "float32")
        results[2] = op.sum(summed, axis=[0, *range(2, axes + 2)])
    narrow_dtype = dtype(input)
    results = [r if r is None else emit(r) for r in results]
    narrow = [
        r if r is None or dtype(r) == narrow_dtype else op.astype(r, narrow_dtype) for r in results
    ]
    return narrow[0], narrow[1], narrow[2]


@converts(aten.conv_tbc.default)
def conv_tbc(self: Any, weight: Any, bias: Any, pad: int = 0) -> Any:
    """A convolution along the first axis; the batch is the second, the channels come last."""
    x, kernel = op.permute_dims(self, [1, 2, 0]), op.permute_dims(weight, [2, 1, 0])
    result = convolution(emit(x), emit(kernel), bias, [1], [pad], [1], False, [0], 1)
    return op.permute_dims(result, [2, 0, 1])


@converts(aten.conv_tbc_backward.default)
def conv_tbc_backward(self: Any, input: Any, weight: Any, bias: Any, pad: int) -> Any:
    """Gradients of the input, the weight and the bias."""
    grad, x = (emit(op.permute_dims(t, [1, 2, 0])) for t in (self, input))
    kernel = emit(op.permute_dims(weight, [2, 1, 0]))
    wanted = [True] * 3
    grads = convolution_backward(
        grad, x, kernel, None, [1], [pad], [1], False, [0], 1, output_mask=wanted
    )
    return op.permute_dims(grads[0], [2, 0, 1]), op.permute_dims(grads[1], [2, 1, 0]), grads[2]


def conv(
    x: Any,
    weight: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Any:
    """A convolution without bias, in the dtype of the sum."""
    x, weight = emit(x), emit(weight)
    axes = _axes(x)
    if not all(isinstance(v, int) for v in (*stride, *padding, *dilation)):
        return te_call(
            _te_conv,
            x,
            weight,
            stride=list(stride),
            padding=list(padding),
            dilation=list(dilation),
            groups=groups,
            dtype=_sum_dtype(x) or dtype(x),
            primfunc_name_hint="conv",
        )
    return _CONV[axes](
        x,
        weight,
        strides=list(stride),
        padding=list(padding),
        dilation=list(dilation),
        groups=groups,
        data_layout=_DATA[axes],
        kernel_layout=_KERNEL[axes],
        out_dtype=_sum_dtype(x),
    )


def conv_transpose(
    x: Any,
    weight: Any,
    sizes: Sequence[Any],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Any:
    """A transposed convolution without bias whose output has these sizes."""
    x, weight = emit(x), emit(weight)
    axes = _axes(x)
    extra = [
        size - ((n - 1) * s - 2 * p + d * (k - 1) + 1)
        for size, n, k, s, p, d in zip(
            sizes, shape(x)[2:], shape(weight)[2:], stride, padding, dilation, strict=True
        )
    ]
    extra = [e if isinstance(e, int) else _constant(e) for e in extra]
    # TVM's own inserts zeros and pads: it can neither crop the full result on the left nor
    # lengthen it by a stride, which PyTorch's padding and output_padding may ask for.
    regular = all(isinstance(v, int) for v in (*extra, *stride, *padding, *dilation))
    regular = regular and all(0 <= e < s for e, s in zip(extra, stride, strict=True))
    regular = regular and all(
        isinstance(k, int) and p <= d * (k - 1)
        for k, p, d in zip(shape(weight)[2:], padding, dilation, strict=True)
    )
    if not regular:
        return te_call(
            _te_conv_transpose,
            x,
            weight,
            sizes=list(sizes),
            stride=list(stride),
            padding=list(padding),
            dilation=list(dilation),
            groups=groups,
            dtype=_sum_dtype(x) or dtype(x),
            primfunc_name_hint="conv_transpose",
        )
    return _CONV_TRANSPOSE[axes](
        x,
        weight,
        strides=list(stride),
        padding=list(padding),
        output_padding=extra,
        dilation=list(dilation),
        groups=groups,
        data_layout=_DATA[axes],
        kernel_layout=_KERNEL_TRANSPOSE[axes],
        out_dtype=_sum_dtype(x),
    )


def _te_conv(
    x: Any,
    weight: Any,
    stride: list[Any],
    padding: list[Any],
    dilation: list[Any],
    groups: int,
    dtype: str,
) -> Any:
    """A convolution whose padding is not known before it runs."""
    outer, inner = weight.shape[0] // groups, weight.shape[1]
    axes = len(stride)

    def element(n: Any, channel: Any, *position: Any) -> Any:
        ic, *taps = reductions
        sources, valid = [], tirx.const(True, "bool")
        for axis in range(axes):
            source = position[axis] * stride[axis] + taps[axis] * dilation[axis] - padding[axis]
            sources.append(source)
            valid = tirx.all(valid, source >= 0, source < x.shape[2 + axis])
        term = x(n, channel // outer * inner + ic, *sources).astype(dtype) * weight(
            channel, ic, *taps
        ).astype(dtype)
        return te.sum(tirx.if_then_else(valid, term, tirx.const(0, dtype)), axis=[ic, *taps])

    reductions = [te.reduce_axis((0, inner), "ic")]
    reductions += [te.reduce_axis((0, weight.shape[2 + a]), f"k{a}") for a in range(axes)]
    sizes = [
        (x.shape[2 + a] + 2 * padding[a] - dilation[a] * (weight.shape[2 + a] - 1) - 1) // stride[a]
        + 1
        for a in range(axes)
    ]
    return te.compute((x.shape[0], weight.shape[0], *sizes), element, name="conv")


def _te_conv_transpose(
    x: Any,
    weight: Any,
    sizes: list[Any],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    dtype: str,
) -> Any:
    """Each output element sums the inputs that reach it."""
    inner = x.shape[1] // groups
    outer = weight.shape[1]
    axes = len(sizes)

    def element(n: Any, channel: Any, *position: Any) -> Any:
        ic, *taps = reductions
        group_channel = channel // outer * inner + ic
        sources, valid = [], tirx.const(True, "bool")
        for axis in range(axes):
            offset = position[axis] + padding[axis] - taps[axis] * dilation[axis]
            source = tirx.floordiv(offset, stride[axis])
            sources.append(source)
            valid = tirx.all(
                valid,
                tirx.floormod(offset, stride[axis]) == 0,
                source >= 0,
                source < x.shape[2 + axis],
            )
        term = x(n, group_channel, *sources).astype(dtype) * weight(
            group_channel, channel % outer, *taps
        ).astype(dtype)
        return te.sum(tirx.if_then_else(valid, term, tirx.const(0, dtype)), axis=[ic, *taps])

    reductions = [te.reduce_axis((0, inner), "ic")]
    reductions += [te.reduce_axis((0, weight.shape[2 + a]), f"k{a}") for a in range(axes)]
    return te.compute((x.shape[0], outer * groups, *sizes), element, name="conv_transpose")


def _weight_gradient(
    data: Any,
    kernel: Any,
    sizes: Sequence[Any],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Any:
    """The correlation of `data` with `kernel` over batch and positions, a tap per dilation.

    With batch and channels swapped it is a convolution: the strides of one are the dilations of
    the other, and the groups take their batches along.
    """
    axes = _axes(data)
    batch, channels, *space = shape(data)
    swap = [1, 0, *[a + 2 for a in range(axes)]]
    if groups == 1:
        data = op.permute_dims(data, swap)
    else:
        spatial = [a + 3 for a in range(axes)]
        data = reshape(data, [batch, groups, channels // groups, *space])
        data = op.permute_dims(data, [2, 1, 0, *spatial])
        data = reshape(data, [channels // groups, groups * batch, *space])
    whole = emit(conv(data, op.permute_dims(kernel, swap), dilation, padding, stride, groups))
    return op.permute_dims(_head(whole, sizes[2:]), swap)


def _head(x: Any, sizes: Sequence[Any]) -> Any:
    """The first so many positions of each spatial axis."""
    if list(sizes) == shape(x)[2:] and all(isinstance(s, int) for s in sizes):
        return x
    axes = list(range(2, 2 + len(sizes)))
    ends = [wide(size) for size in sizes]
    return op.strided_slice(x, axes, [wide(0)] * len(axes), ends, assume_inbound=True)


def _axes(x: Any) -> int:
    axes = ndim(x) - 2
    if axes not in _CONV:
        raise Unsupported(f"a convolution over {axes} axes")
    return axes


def _each(value: Sequence[int], axes: int) -> list[int]:
    values = list(value)
    return values * axes if len(values) == 1 else values


def _constant(size: Any) -> Any:
    from fx2relax.compat import Analyzer, const_int

    return const_int(Analyzer().simplify(size))


def _sum_dtype(x: Any) -> str | None:
    return "float32" if dtype(x) in ("float16", "bfloat16") else None
