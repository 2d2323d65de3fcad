"""Resampling that stays whole while PyTorch traces it.

PyTorch's decompositions compute the source positions with tensors, and the scale of a symbolic size
as a symbolic float; of uint8 they round otherwise than eager. Here each upsampling is one
`fx2relax::resample`, and its gradient one `fx2relax::resample_backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp.decompositions import upsample_compute_output_size
from torch._prims_common import suggest_memory_format

from fx2relax.whole import keep

__all__ = ["resample", "resample_backward"]

aten = torch.ops.aten

# For each kind and number of axes ATen's operator and its gradient.
_OPERATORS: dict[tuple[str, int], tuple[Any, Any]] = {
    ("linear", 1): (aten.upsample_linear1d, aten.upsample_linear1d_backward),
    ("linear", 2): (aten.upsample_bilinear2d, aten.upsample_bilinear2d_backward),
    ("linear", 3): (aten.upsample_trilinear3d, aten.upsample_trilinear3d_backward),
    ("cubic", 2): (aten.upsample_bicubic2d, aten.upsample_bicubic2d_backward),
    ("linear_smooth", 2): (aten._upsample_bilinear2d_aa, aten._upsample_bilinear2d_aa_backward),
    ("cubic_smooth", 2): (aten._upsample_bicubic2d_aa, aten._upsample_bicubic2d_aa_backward),
}
for _axes in (1, 2, 3):
    for _kind, _name in (("nearest", "upsample_nearest"), ("exact", "_upsample_nearest_exact")):
        _operator = getattr(aten, f"{_name}{_axes}d")
        _OPERATORS[_kind, _axes] = _operator, getattr(aten, f"{_name}{_axes}d_backward")


def _call(operator: Any, x: Tensor, sizes: Sequence[Any], kind: str, *settings: Any) -> Any:
    align_corners, scales = settings
    aligned = () if kind in ("nearest", "exact") else (align_corners,)
    # ATen takes a scale that is not positive for one that is not given.
    return operator.default(x, *sizes, *aligned, *scales)


@torch.library.custom_op(
    "fx2relax::resample",
    mutates_args=(),
    schema="(Tensor x, SymInt[] size, str kind, bool align_corners, float[] scales) -> Tensor",
)
def _resample(
    x: Tensor, size: Sequence[Any], kind: str, align_corners: bool, scales: Sequence[float]
) -> Tensor:
    """(batch, channels, *space) with another space; a scale of 0 is that of the sizes.

    `kind`: "nearest", "exact", "linear", "cubic", "linear_smooth" or "cubic_smooth".
    """
    operator = _OPERATORS[kind, len(size)][0]
    result: Tensor = _call(operator, x, [size], kind, align_corners, scales)
    return result


@_resample.register_fake
def _(
    x: Tensor, size: Sequence[Any], kind: str, align_corners: bool, scales: Sequence[float]
) -> Tensor:
    made = x.new_empty([*x.shape[:2], *size])
    return made.contiguous(memory_format=suggest_memory_format(x))


@torch.library.custom_op(
    "fx2relax::resample_backward",
    mutates_args=(),
    schema="(Tensor grad, SymInt[] input_size, str kind, bool align_corners, float[] scales)"
    " -> Tensor",
)
def _resample_backward(
    grad: Tensor,
    input_size: Sequence[Any],
    kind: str,
    align_corners: bool,
    scales: Sequence[float],
) -> Tensor:
    """The gradient of `resample`; `input_size` is the space of its input."""
    operator = _OPERATORS[kind, len(input_size)][1]
    sizes = [list(grad.shape[2:]), [*grad.shape[:2], *input_size]]
    result: Tensor = _call(operator, grad, sizes, kind, align_corners, scales)
    return result.contiguous()


@_resample_backward.register_fake
def _(
    grad: Tensor,
    input_size: Sequence[Any],
    kind: str,
    align_corners: bool,
    scales: Sequence[float],
) -> Tensor:
    return grad.new_empty([*grad.shape[:2], *input_size])


resample = torch.ops.fx2relax.resample.default
resample_backward = torch.ops.fx2relax.resample_backward.default


def _setup(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    x, _, ctx.kind, ctx.align_corners, ctx.scales = inputs
    ctx.space = list(x.shape[2:])


def _gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    settings = (ctx.kind, ctx.align_corners, ctx.scales)
    return resample_backward(grad, ctx.space, *settings), None, None, None, None


_resample.register_autograd(_gradient, setup_context=_setup)


# -- ATen's operators in these terms ---------------------------------------------------------


def _checked(
    x: Tensor, size: Sequence[Any], kind: str, align_corners: bool, scales: Sequence[Any]
) -> Any:
    axes = len(size)
    torch._check(x.dim() == axes + 2, lambda: f"expected {axes + 2} dimensions, got {x.dim()}")
    for length in (*x.shape[1:], *size):
        torch._check(length > 0, lambda: "sizes to upsample must be greater than 0")
    return resample(x, list(size), kind, align_corners, [s or 0.0 for s in scales])


def _kernels(kind: str, axes: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What stands for an operator's ``default`` and ``vec`` overloads."""
    plain = kind in ("nearest", "exact")

    def default(x: Tensor, size: Sequence[Any], *rest: Any, **named: Any) -> Any:
        given = [*rest, *named.values()]
        align_corners, scales = (False, given) if plain else (given[0], given[1:])
        return _checked(x, size, kind, align_corners, [*scales, *[None] * axes][:axes])

    def vec(x: Tensor, size: Sequence[Any] | None, *rest: Any) -> Any:
        factors = rest[-1]
        sizes = upsample_compute_output_size(x.size(), size, factors)
        align_corners = False if plain else rest[0]
        return _checked(x, sizes, kind, align_corners, factors or [None] * axes)

    return default, vec


for (_kind, _axes), (_forward, _) in _OPERATORS.items():
    for _overload, _kernel in zip(
        (_forward.default, _forward.vec), _kernels(_kind, _axes), strict=True
    ):
        keep(_overload, _kernel)
