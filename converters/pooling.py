"""Pooling of one to three axes and its gradients, each one kernel without temporaries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from .common import (
    cast,
    compute_dtype,
    converts,
    dtype,
    emit,
    ndim,
    op,
    product,
    reshape,
    shape,
    te,
    tirx,
)
from .opaque import T, is_large, loops, opaque, wide
from .windows import Adaptive, Window, on_windows, sliding

aten = torch.ops.aten


def _taps(windows: Sequence[Window]) -> list[Any]:
    return [te.reduce_axis((0, w.taps), f"tap{i}") for i, w in enumerate(windows)]


def _sources(windows: Sequence[Window], outputs: Any, taps: Any) -> tuple[list[Any], Any]:
    """The input positions of a tap of every axis, and whether all of them exist."""
    pairs = [w.source(o, t) for w, o, t in zip(windows, outputs, taps, strict=True)]
    return [p for p, _ in pairs], tirx.all(tirx.const(True, "bool"), *[v for _, v in pairs])


def _targets(windows: Sequence[Window], positions: Any, covers: Any) -> tuple[list[Any], Any]:
    pairs = [w.target(p, c) for w, p, c in zip(windows, positions, covers, strict=True)]
    return [o for o, _ in pairs], tirx.all(tirx.const(True, "bool"), *[v for _, v in pairs])


def _inside(windows: Sequence[Window], outputs: Any, taps: Any) -> list[Any]:
    return [w.inside(o, t) for w, o, t in zip(windows, outputs, taps, strict=True)]


# -- largest element ------------------------------------------------------------------------


def _takes_over(new: Any, old: Any) -> Any:
    """PyTorch's rule: the first of the largest, and any NaN, the last one in the end."""
    larger = new > old
    return tirx.any(larger, tirx.isnan(new)) if "float" in str(new.ty.dtype) else larger


def _comparable(x: Any) -> Any:
    """The elements of x, those of bfloat16 in float32: TVM cannot lower their reductions.

    They are widened as they are read, since no kernel is fused with one that reads it by windows.
    """
    return (lambda *i: x(*i).astype("float32")) if str(x.dtype) == "bfloat16" else x


def _te_max(x: Any, windows: Sequence[Window]) -> Any:
    lead = len(x.shape) - len(windows)
    taps = _taps(windows)
    elements = _comparable(x)
    largest = te.comm_reducer(
        lambda a, b: tirx.Select(_takes_over(b, a), b, a),
        lambda t: tirx.min_value(t) if "float" not in str(t) else _minus_infinity(t),
        name="largest",
    )

    def element(*index: Any) -> Any:
        return largest(elements(*index[:lead], *_inside(windows, index[lead:], taps)), axis=taps)

    return te.compute((*x.shape[:lead], *[w.outputs for w in windows]), element, name="max_pool")


def _minus_infinity(dtype_: Any) -> Any:
    return tirx.const(float("-inf"), str(dtype_))


def _lowest(dtype_: str) -> Any:
    return _minus_infinity(dtype_) if "float" in dtype_ else tirx.min_value(dtype_)


def position_of_largest() -> Any:
    """A reducer of pairs of a position and an element."""

    def better(a: Any, b: Any) -> Any:
        take = tirx.any(a[0] < 0, _takes_over(b[1], a[1]))
        return tirx.Select(take, b[0], a[0]), tirx.Select(take, b[1], a[1])

    return te.comm_reducer(
        better, lambda i, v: (tirx.const(-1, i), _lowest(str(v))), name="position_of_largest"
    )


def _te_argmax(x: Any, largest: Any, windows: Sequence[Window]) -> Any:
    """The flat position, among the pooled axes, of each window's largest element.

    The taps of a window are numbered; those that hold its largest element are known by their
    value, so that one number is searched for and no pair.
    """
    lead = len(x.shape) - len(windows)
    taps = _taps(windows)
    elements = _comparable(x)
    floats = "float" in str(x.dtype)
    many: Any = tirx.const(1, "int32")
    number: Any = tirx.const(0, "int32")
    for window, tap in zip(windows, taps, strict=True):
        count = tirx.Cast(
            "int32",
            tirx.const(window.taps, "int64") if isinstance(window.taps, int) else window.taps,
        )
        many, number = many * count, number * count + tirx.Cast("int32", tap.var)

    def key(*index: Any) -> Any:
        value = elements(*index[:lead], *_inside(windows, index[lead:], taps))
        found = tirx.Select(value.equal(largest(*index)), number, many)
        if floats:  # of several NaN the last
            found = tirx.Select(tirx.isnan(value), many - 1 - number, found)
        return te.min(found, axis=taps)

    out = (*x.shape[:lead], *[w.outputs for w in windows])
    keys = te.compute(out, key, name="first_largest")

    def position(*index: Any) -> Any:
        rest = keys(*index)
        if floats:
            rest = tirx.Select(tirx.isnan(largest(*index)), many - 1 - rest, rest)
        places: list[Any] = []
        for window in reversed(windows):
            places.insert(0, tirx.floormod(rest, tirx.Cast("int32", wide(window.taps))))
            rest = tirx.floordiv(rest, tirx.Cast("int32", wide(window.taps)))
        flat: Any = tirx.const(0, "int64")
        for window, at in zip(windows, _inside(windows, index[lead:], places), strict=True):
            flat = flat * window.inputs + at
        return flat

    return te.compute(out, position, name="max_pool_indices")


def _max_with_indices(x: Any, windows: Sequence[Window]) -> tuple[Any, Any]:
    # Two kernels: inference uses the values alone, and the other one vanishes.
    values = emit(on_windows(_te_max, [x], windows, "max_pool"))
    indices = on_windows(_te_argmax, [x, values], windows, "max_pool_indices")
    return cast(values, dtype(x)), indices


def _narrow(x: Any, dtype_: str) -> Any:
    if str(x.dtype) == str(dtype_):
        return x
    return te.compute(x.shape, lambda *i: x(*i).astype(dtype_), name="narrow")


def _max_backward(grad: Any, indices: Any, inputs: Sequence[Any]) -> Any:
    """Each window's gradient is added to the input that was its largest element."""
    axes = len(inputs)
    lead, outputs = shape(grad)[:-axes], shape(grad)[-axes:]
    kind, total = dtype(grad), compute_dtype(dtype(grad))

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        planes, inner, outer = numbers
        gradient, index, out = ins[0], ins[1], outs[0]
        with loops([planes], parallel=0 if is_large(planes * inner) else None) as (plane,):
            with loops([inner]) as (at,):
                out[plane * inner + at] = tirx.const(0, total)
            with loops([outer]) as (n,):
                at = index[plane * outer + n]
                with T.If(tirx.And(at >= wide(0), at < wide(inner))), T.Then():
                    share = gradient[plane * outer + n]
                    share = share if kind == total else tirx.Cast(total, share)
                    out[plane * inner + at] += share

    numbers = [product(lead), product(inputs), product(outputs)]
    result = opaque(
        "max_pool_backward", body, [grad, indices], lambda n: [(n[0] * n[1], total)], numbers
    )
    result = reshape(result, [*lead, *inputs])
    return result if kind == total else op.astype(emit(result), kind)


def _register_max(target: Any, axes: int) -> None:
    def forward(
        self: Any,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = 0,  # type: ignore[assignment]
        dilation: Sequence[int] = 1,  # type: ignore[assignment]
        ceil_mode: bool = False,
    ) -> tuple[Any, Any]:
        """Largest element of each window and where it is; a NaN wins."""
        sizes = shape(self)[-axes:]
        windows = sliding(sizes, kernel_size, stride, padding, dilation, ceil_mode)
        return _max_with_indices(self, windows)

    converts(target)(forward)


_register_max(aten.max_pool2d_with_indices.default, 2)
_register_max(aten.max_pool3d_with_indices.default, 3)


def _register_max_backward(target: Any, axes: int) -> None:
    def backward(
        grad_output: Any,
        self: Any,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        ceil_mode: bool,
        indices: Any,
    ) -> Any:
        return _max_backward(grad_output, indices, shape(self)[-axes:])

    converts(target)(backward)


_register_max_backward(aten.max_pool2d_with_indices_backward.default, 2)
_register_max_backward(aten.max_pool3d_with_indices_backward.default, 3)


def _adaptive(x: Any, output_size: Sequence[Any]) -> list[Adaptive]:
    sizes = shape(x)[-len(output_size) :]
    return [Adaptive(n, o) for n, o in zip(sizes, output_size, strict=True)]


@converts(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(self: Any, output_size: Sequence[Any]) -> tuple[Any, Any]:
    """Largest element of each of so many windows, and where it is; a NaN wins."""
    return _max_with_indices(self, _adaptive(self, output_size))


def _register_adaptive_max_backward(target: Any, axes: int) -> None:
    def backward(grad_output: Any, self: Any, indices: Any) -> Any:
        return _max_backward(grad_output, indices, shape(self)[-axes:])

    converts(target)(backward)


_register_adaptive_max_backward(aten.adaptive_max_pool2d_backward.default, 2)
_register_adaptive_max_backward(aten.adaptive_max_pool3d_backward.default, 3)


# -- mean -----------------------------------------------------------------------------------


def _divisor(
    windows: Sequence[Window], outputs: Any, padded: bool, override: int | None, dtype_: str
) -> Any:
    if override is not None:
        return tirx.const(override, dtype_)
    count: Any = tirx.const(1, "int64")
    for window, output in zip(windows, outputs, strict=True):
        count = count * window.count(output, padded)
    return count.astype(dtype_)


def _te_mean(
    x: Any, windows: Sequence[Window], padded: bool = True, override: int | None = None
) -> Any:
    lead = len(x.shape) - len(windows)
    total = compute_dtype(str(x.dtype))
    taps = _taps(windows)

    def element(*index: Any) -> Any:
        sources, valid = _sources(windows, index[lead:], taps)
        value = x(*index[:lead], *sources).astype(total)
        return te.sum(tirx.if_then_else(valid, value, tirx.const(0, total)), axis=taps)

    out = (*x.shape[:lead], *[w.outputs for w in windows])
    sums = te.compute(out, element, name="window_sum")

    def divided(*index: Any) -> Any:
        divisor = _divisor(windows, index[lead:], padded, override, total)
        quotient = tirx.truncdiv if "int" in total else tirx.div
        return quotient(sums(*index), divisor).astype(str(x.dtype))

    return te.compute(out, divided, name="mean")


def _te_mean_backward(
    grad: Any, windows: Sequence[Window], padded: bool = True, override: int | None = None
) -> Any:
    """Each input collects its share of every window that holds it."""
    lead = len(grad.shape) - len(windows)
    total = compute_dtype(str(grad.dtype))
    covers = [te.reduce_axis((0, w.covers), f"cover{i}") for i, w in enumerate(windows)]

    def element(*index: Any) -> Any:
        targets, valid = _targets(windows, index[lead:], covers)
        divisor = _divisor(windows, targets, padded, override, total)
        share = tirx.div(grad(*index[:lead], *targets).astype(total), divisor)
        return te.sum(tirx.if_then_else(valid, share, tirx.const(0, total)), axis=covers)

    out = (*grad.shape[:lead], *[w.inputs for w in windows])
    return _narrow(te.compute(out, element, name="mean_backward"), str(grad.dtype))


_AVERAGE = {
    2: (op.nn.avg_pool2d, op.nn.adaptive_avg_pool2d),
    3: (op.nn.avg_pool3d, op.nn.adaptive_avg_pool3d),
}


def _register_average(forward: Any, gradient: Any, axes: int) -> None:
    def pool(
        self: Any,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = 0,  # type: ignore[assignment]
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        windows = sliding(shape(self)[-axes:], kernel_size, stride, padding, ceil=ceil_mode)
        batched = ndim(self) == axes + 2
        wide = dtype(self) in ("float32", "float64")
        if batched and wide and not ceil_mode and divisor_override is None:
            return _AVERAGE[axes][0](
                self,
                pool_size=[w.taps for w in windows],
                strides=[w.stride for w in windows],
                padding=[w.padding for w in windows],
                count_include_pad=count_include_pad,
            )
        mean = partial(_te_mean, padded=count_include_pad, override=divisor_override)
        return on_windows(mean, [self], windows, "avg_pool")

    def backward(
        grad_output: Any,
        self: Any,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> Any:
        windows = sliding(shape(self)[-axes:], kernel_size, stride, padding, ceil=ceil_mode)
        share = partial(_te_mean_backward, padded=count_include_pad, override=divisor_override)
        return on_windows(share, [grad_output], windows, "avg_pool_backward")

    converts(forward)(pool)
    converts(gradient)(backward)


_register_average(aten.avg_pool2d.default, aten.avg_pool2d_backward.default, 2)
_register_average(aten.avg_pool3d.default, aten.avg_pool3d_backward.default, 3)


def _register_adaptive_average(forward: Any, gradient: Any, axes: int) -> None:
    def pool(self: Any, output_size: Sequence[Any]) -> Any:
        sizes = [*shape(self), *output_size]
        static = all(isinstance(s, int) and s > 0 for s in sizes)
        if static and ndim(self) == axes + 2 and dtype(self) in ("float32", "float64"):
            return _AVERAGE[axes][1](self, output_size=list(output_size))
        return on_windows(_te_mean, [self], _adaptive(self, output_size), "adaptive_avg_pool")

    def backward(grad_output: Any, self: Any) -> Any:
        windows = _adaptive(self, shape(grad_output)[-axes:])
        name = "adaptive_avg_pool_backward"
        return on_windows(_te_mean_backward, [grad_output], windows, name)

    converts(forward)(pool)
    converts(gradient)(backward)


_register_adaptive_average(
    aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d_backward.default, 2
)
_register_adaptive_average(
    aten._adaptive_avg_pool3d.default, aten._adaptive_avg_pool3d_backward.default, 3
)
