"""Operators with what follows them inside, in one call of cuBLASLt or cuDNN where there is one.

Importing this module registers ``fx2relax::addmm_activation`` and ``fx2relax::convolution_relu``.
The libraries do not have every combination of sizes, dtypes and layouts. A call that they refuse
is made of PyTorch's separate operators, and so are all later calls of its kind; so is every call
of tensors on the processor. Settings are read at each call: a program is the same under all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

_log = logging.getLogger("fx2relax")
# The operators, in half the time of `torch.ops.aten`.
_calls: Any = torch._C._VariableFunctions
_own: Any = torch._C  # the settings, without a call of Python's for each
_library = torch.library.Library("fx2relax", "FRAGMENT")
_library.define(
    "addmm_activation(Tensor bias, Tensor mat1, Tensor mat2, bool use_gelu=False) -> Tensor"
)
_library.define(
    "convolution_relu(Tensor input, Tensor weight, Tensor bias, Tensor? z, SymInt[] stride, "
    "SymInt[] padding, SymInt[] dilation, SymInt groups) -> Tensor"
)
# What was refused: the operator, and of each tensor what libraries choose a kernel by.
_refused: set[Any] = set()
# Sizes that change from call to call are not remembered for ever.
_MOST = 4096


@torch.library.impl(_library, "addmm_activation", "CompositeExplicitAutograd")
def _addmm_activation(
    bias: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, use_gelu: bool = False
) -> torch.Tensor:
    """``relu(mat1 @ mat2 + bias)``, or the tanh GELU of it.

    `aten._addmm_activation` computes that one on a GPU, and the GELU by the error function on the
    processor.

    Args:
        bias: [n].
        mat1: [m, k], of the same dtype, as is the next.
        mat2: [k, n].
        use_gelu: whether it is the GELU.

    Returns:
        [m, n], of the same dtype.
    """

    def apart() -> torch.Tensor:
        product = torch.addmm(bias, mat1, mat2)
        if use_gelu:
            return torch.nn.functional.gelu(product, approximate="tanh")
        return torch.relu_(product)

    if not _on_gpu(mat1):
        return apart()

    def fused() -> torch.Tensor:
        return _calls._addmm_activation(  # type: ignore[no-any-return]
            bias, mat1, mat2, use_gelu=use_gelu
        )

    return _guarded(("addmm_activation", use_gelu), (bias, mat1, mat2), fused, apart)


@torch.library.impl(_library, "convolution_relu", "CompositeExplicitAutograd")
def _convolution_relu(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    z: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """``relu(convolution(input, weight, bias) + z)``.

    Args:
        input: [n, c, ...space], with two or three axes of space.
        weight: [k, c // groups, ...window], of the same dtype, as are the next two.
        bias: [k].
        z: of the result's shape, or None for no sum.
        stride: a number for each axis of space, as the next two.
        padding: the same.
        dilation: the same.
        groups: of channels.

    Returns:
        [n, k, ...space], of the same dtype.
    """
    window = stride, padding, dilation

    def apart() -> torch.Tensor:
        result: torch.Tensor = _calls.convolution(
            input, weight, bias, *window, False, [0] * len(stride), groups
        )
        return torch.relu_(result if z is None else result.add_(z))

    if not _on_gpu(input) or not _cudnn():
        return apart()

    def fused() -> torch.Tensor:
        result: torch.Tensor
        if z is None:
            result = _calls.cudnn_convolution_relu(input, weight, bias, *window, groups)
        else:
            result = _calls.cudnn_convolution_add_relu(input, weight, z, 1, bias, *window, groups)
        return result

    kind = "convolution_relu", *(tuple(w) for w in window), groups
    tensors = (input, weight, bias) if z is None else (input, weight, bias, z)
    return _guarded(kind, tensors, fused, apart)


def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _cudnn() -> bool:
    """Whether PyTorch may call cuDNN's fused convolutions, which are not always repeatable."""
    repeated = _own._get_cudnn_deterministic() or _own._get_deterministic_algorithms()
    return bool(_own._get_cudnn_enabled() and not repeated)


def _guarded(
    kind: tuple[Any, ...],
    tensors: Sequence[torch.Tensor],
    fused: Callable[[], torch.Tensor],
    apart: Callable[[], torch.Tensor],
) -> torch.Tensor:
    """What `fused` returns, or `apart` where a library refuses this kind of call.

    Args:
        kind: the operator and its settings.
        tensors: its operands.
        fused: calls the library.
        apart: computes the same by several calls.

    Raises:
        what `apart` raises, and what says that the GPU has failed or its memory is full.
    """
    if _refused and _key(kind, tensors) in _refused:
        return apart()
    try:
        return fused()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError as error:  # no kernel was found for it
        result = apart()
        if len(_refused) >= _MOST:
            _refused.clear()
        _refused.add(_key(kind, tensors))
        _log.info("%s %s is made of separate calls: %s", kind[0], tensors[0].shape, error)
        return result


def _key(kind: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> Any:
    return kind, *((t.shape, t.stride(), t.dtype, t.device) for t in tensors)


#: The operators' own functions, without PyTorch's dispatcher before them.
FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "addmm_activation": _addmm_activation,
    "convolution_relu": _convolution_relu,
}
