"""Operators whose results depend on strides: brought to a layout for which the rules agree.

A rule stands before the overload's own converter, and declines what that takes as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import (
    compute_elementwise_output_logical_to_physical_perm,
    is_contiguous_or_false,
    suggest_memory_format,
)

from fx2relax.eager_strides import elementwise_strides
from fx2relax.layouts import concrete, inverse

aten = torch.ops.aten
_SHARES = 6  # where `embedding_bag` has its per_sample_weights


def _compact_table(target: Any) -> Callable[..., Any]:
    """`embedding_bag`: what is kept for the gradient depends on strides of the table and shares."""

    def compact(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.stride(-1) == 1:
            return value
        return value.contiguous()

    def rule(weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        given = [weight, *args]
        taken = [compact(v) if n in (0, _SHARES) else v for n, v in enumerate(given)]
        shares = {k: compact(v) for k, v in kwargs.items()}
        if all(shares[k] is v for k, v in kwargs.items()):
            return _with(target, given, taken, kwargs)
        return target(*taken, **shares)

    return rule


def _slices(x: torch.Tensor, dim: int, distinct: Callable[[torch.Tensor], Any]) -> Any:
    """Distinct slices along an axis: eager's lie in memory slice by slice, PyTorch's rule forgets.

    Along the first axis both are compact.
    """
    dim = dim % x.dim() if x.dim() else 0
    if dim == 0:
        return NotImplemented
    found, *rest = distinct(x.movedim(dim, 0).contiguous())
    return found.movedim(0, dim), *rest


def _along(target: Any) -> Callable[..., Any]:
    def rule(x: torch.Tensor, dim: int, *flags: bool) -> Any:
        return _slices(x, dim, lambda moved: target(moved, 0, *flags))

    return rule


def _unique_consecutive(
    x: torch.Tensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    if dim is None:
        return NotImplemented
    flags = return_inverse, return_counts
    return _slices(x, dim, lambda moved: aten.unique_consecutive(moved, *flags, 0))


def _with(target: Any, args: Any, given: Any, kwargs: Any) -> Any:
    """The operator on other operands; declined where they are the same ones."""
    if all(a is b for a, b in zip(args, given, strict=True)):
        return NotImplemented
    return target(*given, **kwargs)


def _compact(target: Any, *positions: int) -> Callable[..., Any]:
    """Results that are compact in eager whatever their operands are; PyTorch's rule keeps strides.

    The operands at `positions` decide on the results' strides: they are made compact.
    """

    def rule(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for position in positions:
            value = given[position]
            if isinstance(value, torch.Tensor) and not is_contiguous_or_false(value):
                given[position] = value.contiguous()
        return _with(target, args, given, kwargs)

    return rule


def _batch_norm(target: Any, *positions: int) -> Callable[..., Any]:
    """Compact results as well, or channels_last where the last of the operands is."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        x = args[positions[-1]]
        layout = torch.contiguous_format
        if not is_contiguous_or_false(x):
            layout = suggest_memory_format(x)
        given = list(args)
        for position in positions:
            given[position] = args[position].contiguous(memory_format=layout)
        return _with(target, args, given, kwargs)

    return rule


def _angle(x: torch.Tensor) -> Any:
    """Eager's are compact for complex numbers, and laid out as `x` is for others."""
    if not x.is_complex() or is_contiguous_or_false(x):
        return NotImplemented
    return aten.angle.default(x.contiguous())


def _binary_cross_entropy(x: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Laid out as `x` is in eager, and as `target` by PyTorch's rule."""
    order, _ = compute_elementwise_output_logical_to_physical_perm(x)
    if target.dim() != x.dim() or is_contiguous_or_false(target.permute(order)):
        return NotImplemented
    target = target.permute(order).contiguous().permute(inverse(order))
    return aten.binary_cross_entropy.default(x, target, *args, **kwargs)


def _as_eager(target: Any) -> Callable[..., Any]:
    """An elementwise operator that PyTorch's rule takes apart, with its operands in another order.

    They are laid out as eager lays out the result, so that each step is.
    """

    def rule(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        whole = torch.broadcast_tensors(*tensors)
        layouts = [(tuple(concrete(x.shape)), tuple(concrete(x.stride()))) for x in tensors]
        strides = elementwise_strides(tuple(concrete(whole[0].shape)), layouts)
        order = sorted(range(len(strides)), key=lambda axis: -strides[axis])
        if all(is_contiguous_or_false(x.permute(order)) for x in whole):
            return NotImplemented
        back = inverse(order)
        given = iter([x.permute(order).contiguous().permute(back) for x in whole])
        args = tuple(next(given) if isinstance(x, torch.Tensor) else x for x in args)
        return target(*args, **kwargs)

    return rule


def _roll(x: torch.Tensor, shifts: list[int], dims: tuple[int, ...] | list[int] = ()) -> Any:
    """Eager joins two parts of `x`: what is channels_last stays so if both of the parts are."""
    if is_contiguous_or_false(x) or not dims:
        return NotImplemented
    layout = suggest_memory_format(x)
    if layout is torch.contiguous_format:
        return NotImplemented
    if len(dims) > 1:
        for shift, dim in zip(shifts, dims, strict=True):
            x = aten.roll.default(x, [shift], [dim])
        return x
    size = x.shape[dims[0]]
    start = -shifts[0] % size if size else 0
    parts = x.narrow(dims[0], start, size - start), x.narrow(dims[0], 0, start)
    if any(suggest_memory_format(part) is not layout for part in parts):
        return NotImplemented
    return aten.roll.default(x.contiguous(), shifts, dims).contiguous(memory_format=layout)


def _index(x: torch.Tensor, indices: list[torch.Tensor | None]) -> Any:
    """What permuted indices choose is laid out as they are in eager, and compact by PyTorch's rule.

    The axes of the indices are put in the order of memory, and in their own order afterwards.
    """
    tensors = [i for i in indices if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for i in tensors):
        return NotImplemented
    wide = torch.broadcast_tensors(*tensors)
    order, _ = compute_elementwise_output_logical_to_physical_perm(*wide)
    rank = len(order)
    if order == list(range(rank)):
        return NotImplemented
    ordered = iter(wide)
    given = [None if i is None else next(ordered).permute(order) for i in indices]
    places = [n for n, i in enumerate(indices) if i is not None]
    together = places[-1] - places[0] == len(places) - 1
    first = places[0] if together else 0
    result = aten.index.Tensor(x, given)
    back = [first + axis for axis in inverse(order)]
    return result.permute(*range(first), *back, *range(first + rank, result.dim()))


# Where the operands stand that decide on the strides.
_COMPACT: dict[Any, tuple[int, ...]] = {
    aten._standard_gamma.default: (0,),
    aten.huber_loss_backward.default: (0, 1, 2),
    aten.ldexp.Tensor: (1,),
    aten.log_sigmoid_backward.default: (1, 2),
    aten.log_sigmoid_forward.default: (0,),
    aten.mse_loss_backward.default: (0, 1, 2),
    aten.normal.Tensor_Tensor: (0, 1),
    aten.normal.float_Tensor: (1,),
    aten.poisson.default: (0,),
    aten.pow.Scalar: (1,),
    aten.rrelu_with_noise_functional.default: (0, 1),
    aten.smooth_l1_loss_backward.default: (0, 1, 2),
}
_REORDERED = (
    aten.copysign.Tensor,
    aten.heaviside.default,
    aten.logaddexp.default,
    aten.logaddexp2.default,
    aten.logit_backward.default,
    aten.special_xlog1py.default,
    aten.xlogy.Tensor,
)
_BATCH_NORM: dict[Any, tuple[int, ...]] = {
    aten._batch_norm_no_update.default: (0,),
    aten._batch_norm_with_update_functional.default: (0,),
    aten._native_batch_norm_legit.no_stats: (0,),
    aten._native_batch_norm_legit_functional.default: (0,),
    aten._native_batch_norm_legit_no_training.default: (0,),
    aten.batch_norm_backward.default: (0, 1),
    aten.native_batch_norm_backward.default: (0, 1),
}

RULES: dict[Any, Callable[..., Any]] = {
    aten._embedding_bag.default: _compact_table(aten._embedding_bag.default),
    aten._embedding_bag_forward_only.default: _compact_table(
        aten._embedding_bag_forward_only.default
    ),
    **{target: _compact(target, *positions) for target, positions in _COMPACT.items()},
    **{target: _batch_norm(target, *positions) for target, positions in _BATCH_NORM.items()},
    aten.angle.default: _angle,
    aten.binary_cross_entropy.default: _binary_cross_entropy,
    **{target: _as_eager(target) for target in _REORDERED},
    aten.index.Tensor: _index,
    aten.roll.default: _roll,
    aten.unique_dim.default: _along(aten.unique_dim.default),
    aten.unique_dim_consecutive.default: _along(aten.unique_dim_consecutive.default),
    aten.unique_consecutive.default: _unique_consecutive,
}
