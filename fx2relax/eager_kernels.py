"""Which calls PyTorch's own kernels take.

Fake tensors let through what eager refuses: softplus of integers, gcd of floats, std of booleans.
The kernel itself knows, and is asked with small tensors of the same dtypes.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

_COMMON = (torch.float32, torch.float64)
_HALF = (torch.float16, torch.bfloat16)
# Kernels whose answer depends on the shapes are asked about tensors of up to so many elements.
_LARGEST = 1 << 16
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_known: dict[tuple[Any, ...], str | None] = {}


def refusal(target: Any, args: Any, kwargs: Any, *, halves: bool = True) -> str | None:
    """PyTorch's error for a call on operands of these dtypes and shapes, whatever they hold.

    Args:
        target: an ATen overload; what else it is is never refused.
        args: fake tensors, symbolic sizes and plain values.
        kwargs: likewise.
        halves: ask for float16 and bfloat16 as they are; else as float32, for a graph that may
            run on another device.

    Returns:
        the error's text; None if the kernel takes the call, or was not asked.
    """
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    if torch.Tag.nondeterministic_seeded in target.tags or target.is_view:
        return None
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    pointwise = torch.Tag.pointwise in target.tags
    if not _worth_asking([v for v in leaves if isinstance(v, torch.Tensor)], pointwise):
        return None
    try:
        described = [_described(v, pointwise, halves) for v in leaves]
    except _Unknown:
        return None
    key = (target, str(structure), *map(repr, described))
    if key not in _known:
        _known[key] = _asked(target, structure, described)
    return _known[key]


def asking(target: Any, rule: Callable[..., Any], *, halves: bool = True) -> Callable[..., Any]:
    """A decomposition that declines what PyTorch's kernel does not take."""

    @functools.wraps(rule)
    def asked(*args: Any, **kwargs: Any) -> Any:
        if refusal(target, args, kwargs, halves=halves) is not None:
            return NotImplemented
        return rule(*args, **kwargs)

    return asked


class _Unknown(Exception):
    """An operand that cannot be made."""


def _worth_asking(tensors: list[torch.Tensor], pointwise: bool) -> bool:
    if not tensors or any(t.layout is not torch.strided or t.is_quantized for t in tensors):
        return False
    if pointwise:
        return True
    dtypes = {t.dtype for t in tensors}
    if dtypes & set(_COMMON):  # the dtypes that kernels have
        return False
    # The pivots of a factorisation, which no kernel checks.
    complexes = {d for d in dtypes if d.is_complex}
    return not complexes or complexes == dtypes


def _described(value: Any, pointwise: bool, halves: bool) -> Any:
    if isinstance(value, torch.Tensor):
        dtype = torch.float32 if value.dtype in _HALF and not halves else value.dtype
        shape = [1] * value.dim() if pointwise else [_hint(size) for size in value.shape]
        if math.prod(shape) > _LARGEST:
            raise _Unknown
        return torch.Size(shape), dtype, value.device
    return _hint(value)


def _hint(value: Any) -> Any:
    if not isinstance(value, _SYMBOLIC):
        return value
    hint = getattr(value.node, "hint", None)
    if hint is None:
        raise _Unknown
    return hint


def _asked(target: Any, structure: Any, described: list[Any]) -> str | None:
    error = _error(target, structure, described)
    if error is None:
        return None
    if isinstance(error, NotImplementedError):
        return str(error).strip()
    # Whatever else it objects to (lengths that do not add up) it does in float64 as well.
    for masks in (False, True):
        wide = [_in_float64(d, masks) for d in described]
        if _error(target, structure, wide) is None:
            return str(error).strip()
    return None


def _error(target: Any, structure: Any, described: list[Any]) -> Exception | None:
    """What a kernel raises; zeros are valid indices, ones are valid divisors."""
    error: Exception | None = None
    for fill in (torch.zeros, torch.ones):
        try:
            with _plain_pytorch():
                operands = [
                    fill(d[0], dtype=d[1], device=d[2]) if _is_tensor(d) else d for d in described
                ]
                args, kwargs = pytree.tree_unflatten(operands, structure)
                target(*args, **kwargs)
            return None
        except Exception as raised:
            error = raised
    return error


def _is_tensor(described: Any) -> bool:
    return isinstance(described, tuple) and isinstance(described[0], torch.Size)


def _in_float64(described: Any, masks: bool) -> Any:
    """An operand as a float64, a boolean one too unless `masks`."""
    if _is_tensor(described):
        kept = masks and described[1] is torch.bool
        return described[0], torch.bool if kept else torch.float64, described[2]
    return float(described) if isinstance(described, bool) and not masks else described


@contextlib.contextmanager
def _plain_pytorch() -> Any:
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with (
        _disable_current_modes(),
        torch.no_grad(),
        torch._C._ExcludeDispatchKeyGuard(autocast),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
