"""Complex tensors: operators that do the same to the real and to the imaginary part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fx2relax.complexes import Complex
from fx2relax.registry import lookup

from .common import Unsupported, converts

aten = torch.ops.aten

# What makes a tensor of numbers that are not given.
_MADE = (
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten.zeros.default,
)
# What moves elements or adds them up.
_ALIKE = (
    *_MADE,
    aten.view.default,
    aten.view_copy.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten._reshape_copy.default,
    aten._reshape_alias.default,
    aten.permute.default,
    aten.permute_copy.default,
    aten.as_strided.default,
    aten.as_strided_copy.default,
    aten.as_strided_scatter.default,
    aten.transpose.int,
    aten.transpose_copy.int,
    aten.t.default,
    aten.slice.Tensor,
    aten.slice_copy.Tensor,
    aten.select.int,
    aten.select_copy.int,
    aten.unsqueeze.default,
    aten.unsqueeze_copy.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.diagonal.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.unfold.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten.flip.default,
    aten.roll.default,
    aten.repeat.default,
    aten.index_select.default,
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.gather.default,
    aten.take.default,
    aten.triu.default,
    aten.tril.default,
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.replication_pad2d.default,
    aten.unfold_backward.default,
    aten.select_backward.default,
    aten.slice_backward.default,
    aten.diagonal_backward.default,
    aten.expand_copy.default,
    aten.squeeze_copy.default,
    aten.squeeze_copy.dim,
    aten.squeeze_copy.dims,
    aten.diagonal_copy.default,
    aten.unbind_copy.int,
    aten.unfold_copy.default,
    aten.split_copy.Tensor,
    aten.split_with_sizes_copy.default,
    aten.unsafe_split.Tensor,
    aten.t_copy.default,
    aten.alias_copy.default,
    aten.detach_copy.default,
    aten.lift_fresh.default,
    aten.index_copy.default,
    aten.put.default,
    aten.reflection_pad3d.default,
    aten.replication_pad1d.default,
    aten.replication_pad3d.default,
    aten.zero.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.mean.dim,
    aten.cumsum.default,
    aten.masked_scatter.default,
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.diagonal_scatter.default,
    aten.scatter.src,
    aten.scatter_add.default,
    aten.index_add.default,
    aten.index_put.default,
    aten._unsafe_index_put.default,
)


def _picked(value: Any, which: int) -> Any:
    if isinstance(value, Complex):
        return value.parts[which]
    if isinstance(value, complex):
        return value.imag if which else value.real
    if isinstance(value, (list, tuple)):
        return [_picked(v, which) for v in value]
    return value


def real_converter(target: Any) -> Callable[..., Any]:
    """What converts an operator for real tensors."""
    converter = lookup(target)
    if converter is None:
        raise Unsupported("no converter for real tensors")
    return converter.function


def on_parts(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """A real converter's results for the real parts and for the imaginary ones, put together."""
    real, imag = (
        function(*_picked(list(args), n), **{k: _picked(v, n) for k, v in kwargs.items()})
        for n in (0, 1)
    )
    if isinstance(real, (tuple, list)):
        return tuple(Complex(*parts) for parts in zip(real, imag, strict=True))
    return Complex(real, imag)


def part_keywords(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A complex dtype among the keywords as that of the parts."""
    given = kwargs.get("dtype")
    return kwargs if given is None else {**kwargs, "dtype": given.to_real()}


# Parameters that stand for numbers and not for places, beside the first.
_NUMBERS = {"src", "source", "values"}


def _refuse_real(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """What is real among the numbers has to become complex first."""
    for place, parameter in enumerate(target._schema.arguments):
        if place and parameter.name not in _NUMBERS:
            continue
        value = args[place] if place < len(args) else kwargs.get(parameter.name)
        values = value if isinstance(value, (list, tuple)) else [value]
        if not all(isinstance(v, Complex) for v in values):
            raise Unsupported("real and complex tensors together")
    if any(isinstance(v, complex) for v in (*args, *kwargs.values())):
        raise Unsupported("a complex number as a factor")


def _alike(target: Any) -> Callable[..., Any]:
    def convert(*args: Any, **kwargs: Any) -> Any:
        real = real_converter(target)
        if target not in _MADE:
            _refuse_real(target, args, kwargs)
        return on_parts(real, args, part_keywords(kwargs))

    return convert


for _target in _ALIKE:
    converts(_target, complex_numbers=True)(_alike(_target))
