"""The tensor boundary: what TVM assumes of a tensor, and what eager's outputs look like.

TVM's kernels take compact tensors, each element in its own place, and do not check the address.
Those for GPUs read vectors, at an address that is a multiple of their size: an error there would
end all work on the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from fx2relax.compat import TVMTensor, tvm_ffi
from fx2relax.errors import ArgumentError
from fx2relax.layouts import inverse
from fx2relax.outputs import OutputSpec
from fx2relax.params import InputSpec
from fx2relax.runtime.owned import owned

#: The addresses at which tensors begin, by the kind of device, where elements of their own do not
#: suffice: multiples of these.
ALIGNED = {"cuda": 16}


class Opaque:
    """A value that TVM has no type for (sparse, a Python object), carried untouched."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def ready(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, dense, each in its own place: the tensor itself wherever it is so.

    Args:
        tensor: any strided CPU or CUDA tensor; it is not written to. A complex one becomes the
            real tensor of its pairs.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.numel() == 0:
        return _empty(tensor)
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if not begins_well(tensor):  # a slice, or memory that another library has packed
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def begins_well(tensor: torch.Tensor) -> bool:
    """Whether kernels may read a tensor from where it begins."""
    return not tensor.data_ptr() % ALIGNED.get(tensor.device.type, tensor.element_size())


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    # TVM compares even the strides of an empty tensor; its own count a size of 0 as 0.
    strides = [math.prod(tensor.shape[axis + 1 :]) for axis in range(tensor.dim())]
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return fresh.as_strided(tensor.shape, strides)


def argument(spec: InputSpec, value: Any, kind: str = "cpu") -> Any:
    """A caller's argument as the Relax function takes it, a number on a device of this kind.

    Raises:
        ArgumentError: it lies where the program cannot take it from.
    """
    if isinstance(value, torch.Tensor):
        wanted = getattr(spec.val, "device", None)
        if wanted is not None and wanted.type == "cuda" and value.device != wanted:
            # A kernel would take the address for one of its own memory.
            raise ArgumentError(f"argument {spec.name!r} is on {value.device} and not on {wanted}")
        if value.layout is not torch.strided or value.is_quantized:
            return Opaque(value)
        if spec.at_start and value.storage_offset():
            raise ArgumentError(f"argument {spec.name!r} does not begin where its storage does")
        if spec.storage is not None:
            value = _storage(spec, spec.storage, value)
        elif spec.permutation is not None:
            value = value.permute(spec.permutation)
        return ready(value)
    if isinstance(spec.val, torch.SymFloat):
        return torch.full((), float(value), dtype=torch.float64, device=kind)
    if isinstance(value, int):
        return tvm_ffi.Shape((value,))
    return Opaque(value)


def _storage(spec: InputSpec, count: int, value: torch.Tensor) -> torch.Tensor:
    """The memory of an argument, flat, in which it has to lie as the graph takes it to."""
    lies = value.shape == spec.val.shape and value.stride() == spec.val.stride()
    if not lies or value.storage_offset() != spec.val.storage_offset() or value.is_neg():
        raise ArgumentError(f"argument {spec.name!r} lies elsewhere in its storage")
    if value.untyped_storage().nbytes() < count * value.element_size():
        raise ArgumentError(f"the storage of argument {spec.name!r} is smaller")
    return value.detach().as_strided((count,), (1,), 0)


def result(value: Any) -> Any:
    """What the Relax function returned, as PyTorch's: TVM's own tensors where it took none."""
    if isinstance(value, TVMTensor):
        value = from_dlpack(value.__dlpack__())
    if isinstance(value, torch.Tensor) and value.is_cuda:
        value = owned(value)
    # A tensor of no elements has strides of TVM's own, and may be given as `out=`, to be resized.
    if isinstance(value, torch.Tensor) and value.numel() == 0:
        return torch.empty(value.shape, dtype=value.dtype, device=value.device)
    return value


def output(spec: OutputSpec, results: Sequence[Any], arguments: Sequence[Any]) -> Any:
    """One output of the graph, with the strides that eager gives it."""
    value = _output(spec, results, arguments)
    if spec.conjugate:
        value = value.conj()
    return torch._neg_view(value) if spec.negated else value


def _output(spec: OutputSpec, results: Sequence[Any], arguments: Sequence[Any]) -> Any:
    if spec.kind == "result":
        tensor = results[spec.index]
        if isinstance(tensor, Opaque):
            return tensor.value
        if spec.pairs:
            tensor = torch.view_as_complex(tensor)
        if spec.permutation is not None:
            tensor = tensor.permute(inverse(spec.permutation))
        if spec.strides is not None:
            tensor = _with_strides(tensor, tuple(results[spec.strides]))
        if spec.exact is not None:
            exact = results[spec.exact] if isinstance(spec.exact, int) else spec.exact
            tensor = tensor.as_strided(tensor.shape, tuple(exact))
        if spec.expanded is not None:
            tensor = tensor.expand(tuple(results[spec.expanded]))
        return tensor
    if spec.kind == "truth":
        return bool(results[spec.index][0])
    if spec.kind == "size":
        return int(results[spec.index][0])
    if spec.kind == "input":
        return arguments[spec.index]
    if spec.replay is not None:
        numbers = () if spec.numbers is None else results[spec.numbers]
        return spec.replay(arguments[spec.index], numbers)
    if spec.view is not None:
        size, stride, offset = (tuple(results[i]) for i in spec.view)
        base = arguments[spec.index] if spec.kind == "input_view" else results[spec.index]
        if base.dtype == spec.dtype:
            return base.as_strided(size, stride, base.storage_offset() + offset[0])
        bits = torch.empty(0, dtype=spec.dtype, device=base.device)
        before = base.storage_offset() * base.element_size() // bits.element_size()
        return bits.set_(base.untyped_storage(), before + offset[0], size, stride)
    return spec.value


def _with_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A copy with the strides of a view that eager would have returned."""
    given = [stride if stride else tensor.stride(axis) for axis, stride in enumerate(strides)]
    result = torch.empty_strided(tensor.shape, given, dtype=tensor.dtype, device=tensor.device)
    return result.copy_(tensor)


def describe(value: Any) -> str:
    """A value in an error message: shape, dtype and device of a tensor."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype} on {value.device}"
    return f"{type(value).__name__} {value!r}"


def mismatch(spec: InputSpec, value: Any, device: torch.device) -> str | None:
    """Why a value cannot be this argument, in words; None where it can."""
    if not isinstance(spec.val, torch.Tensor):
        wanted = isinstance(value, int) or not isinstance(spec.val, torch.SymInt)
        return None if wanted else f"expected an int, got {describe(value)}"
    if not isinstance(value, torch.Tensor):
        return f"expected a tensor, got {describe(value)}"
    if value.dtype is not spec.val.dtype:
        return f"expected dtype {spec.val.dtype}, got {describe(value)}"
    elsewhere = device.type == "cuda" and value.device != device
    if value.device.type != device.type or elsewhere:
        return f"expected a tensor on {device}, got {describe(value)}"
    wanted_shape = tuple(spec.val.shape)
    if value.dim() != len(wanted_shape) or any(
        isinstance(w, int) and w != g for w, g in zip(wanted_shape, value.shape, strict=True)
    ):
        return f"expected shape {wanted_shape}, got {describe(value)}"
    return None
