"""Pooling over windows whose places are drawn at random: they come as a tensor of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .common import (
    Unsupported,
    converts,
    dtype,
    op,
    product,
    reshape,
    shape,
    shape_expr,
    te,
    te_call,
    tirx,
)
from .pooling import position_of_largest
from .scatter import scattered

aten = torch.ops.aten


def _starts(samples: Any, n: Any, c: Any, which: int, size: Any, count: Any, taps: int) -> Any:
    """From an output position to where its window starts; the last one ends with the axis."""
    kind = str(samples.dtype)
    sample = samples(n, c, which)
    last = size - taps
    if isinstance(count, int) and count == 1:
        return lambda _: last
    step = tirx.Cast(kind, last) / tirx.Cast(kind, count - 1)

    def start(i: Any) -> Any:
        drawn = tirx.Cast("int64", (tirx.Cast(kind, i) + sample) * step)
        return tirx.Select(i.equal(count - 1), last, drawn - tirx.Cast("int64", sample * step))

    return start


def _register(target: Any, gradient: Any, axes: int) -> None:
    # Samples are those of the width, then the height; in three axes depth, height, width.
    order = [1, 0] if axes == 2 else [0, 1, 2]

    def pool(
        self: Any, kernel_size: Sequence[int], output_size: Sequence[Any], random_samples: Any
    ) -> tuple[Any, Any]:
        if dtype(self) not in ("float32", "float64"):
            raise Unsupported("half precision, in which eager places the windows too")
        sizes = shape(self)
        batch = [1] * (axes + 2 - len(sizes))
        x = reshape(self, [*batch, *sizes]) if batch else self

        def windows(t: Any, samples: Any, counts: Any) -> list[Any]:
            taps = [te.reduce_axis((0, k), f"tap{a}") for a, k in enumerate(kernel_size)]

            def element(n: Any, c: Any, *i: Any) -> Any:
                at = []
                for a, size in enumerate(t.shape[2:]):
                    start = _starts(samples, n, c, order[a], size, counts[a], kernel_size[a])
                    at.append(start(i[a]) + taps[a])
                flat: Any = tirx.const(0, "int64")
                for size, position in zip(t.shape[2:], at, strict=True):
                    flat = flat * size + position
                return position_of_largest()((flat, t(n, c, *at)), axis=taps)

            out = (*t.shape[:2], *counts)
            return list(te.compute(out, element, name="fractional_max_pool"))

        counts = list(output_size)
        both = te_call(windows, x, random_samples, counts, primfunc_name_hint="fractional_max_pool")
        out = [*sizes[: len(sizes) - axes], *counts]
        return reshape(both[1], out), reshape(both[0], out)

    def backward(
        grad_output: Any,
        self: Any,
        kernel_size: Sequence[int],
        output_size: Sequence[Any],
        indices: Any,
    ) -> Any:
        sizes = shape(self)
        lead = sizes[: len(sizes) - axes]
        zeros = op.zeros(shape_expr([*lead, product(sizes[len(lead) :])]), dtype(self))
        flat = [*lead, product(shape(indices)[len(lead) :])]
        grads, at = reshape(grad_output, flat), reshape(indices, flat)
        return reshape(scattered(zeros, -1, at, grads, "sum"), sizes)

    converts(target)(pool)
    converts(gradient)(backward)


_register(aten.fractional_max_pool2d.default, aten.fractional_max_pool2d_backward.default, 2)
_register(aten.fractional_max_pool3d.default, aten.fractional_max_pool3d_backward.default, 3)
