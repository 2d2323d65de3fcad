"""Tensors of the caller's as TVM takes them, and TVM's as the caller takes them.

Memory is shared wherever it lies as TVM needs it: dense, and each element in its own place.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm_ffi

from fx2relax.errors import ArgumentError

from .dtypes import SIZES, bits_dtype, is_foreign, numpy_dtype


class _Memory:
    """Memory of another array, which NumPy may take as writable.

    Memory that may only be read has no DLPack form that TVM knows. TVM does not write to what a
    function is called with.
    """

    def __init__(self, owner: np.ndarray[Any, Any]) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (owner.ctypes.data, False),
            "shape": (owner.size,),
            "typestr": owner.dtype.str,
        }


def from_bits(bits: np.ndarray[Any, Any], shape: Sequence[int], dtype: str, align: int = 0) -> Any:
    """Bytes in the host's memory as a TVM tensor that shares them.

    Args:
        bits: flat uint8.
        shape: of the tensor.
        dtype: as TVM spells it.
        align: at a multiple of how many bytes it has to begin; it is copied where it does not.
    """
    if not bits.size:
        return empty(shape, dtype)
    if bits.ctypes.data % max(align, SIZES[dtype]):
        bits = _copied(bits, align)
    elif not bits.flags.writeable:
        bits = np.asarray(_Memory(bits))
    plain = bits_dtype(dtype) if is_foreign(dtype) else numpy_dtype(dtype)
    tensor = tvm_ffi.from_dlpack(bits.view(plain).reshape(tuple(shape)))
    return _retyped(tensor, dtype) if is_foreign(dtype) else tensor


def _copied(bits: np.ndarray[Any, Any], align: int) -> np.ndarray[Any, Any]:
    align = max(align, 64)
    room = np.empty(bits.size + align, np.uint8)
    start = -room.ctypes.data % align
    copy = room[start : start + bits.size]
    copy[...] = bits
    return copy


def host() -> Any:
    """The CPU, as a device."""
    return tvm_ffi.device("cpu")


def empty(shape: Sequence[int], dtype: str, device: Any = None) -> Any:
    """A TVM tensor of memory with nothing in it; on the host where no device is given."""
    make = tvm_ffi.get_global_func("runtime.TVMTensorAllocWithScope")
    device = host() if device is None else device
    return make(tvm_ffi.Shape(tuple(shape)), tvm_ffi.dtype(dtype), device, None)


def zeros(shape: Sequence[int], dtype: str, device: Any) -> Any:
    """A TVM tensor of zeros."""
    count = int(np.prod(shape, dtype=np.int64)) * SIZES[dtype]
    return on_device(from_bits(np.zeros(count, np.uint8), shape, dtype, 64), device)


def copy(source: Any, to: Any) -> None:
    """Copy a dense TVM tensor into another, on whatever devices they are."""
    tvm_ffi.get_global_func("runtime.TVMTensorCopyFromTo")(source, to)


def on_device(tensor: Any, device: Any) -> Any:
    """A TVM tensor, copied where it is on another device."""
    if tensor.device == device:
        return tensor
    target = empty(tensor.shape, str(tensor.dtype), device)
    copy(tensor, target)
    return target


def _retyped(tensor: Any, dtype: str) -> Any:
    view = tvm_ffi.get_global_func("runtime.TVMTensorCreateView")
    return view(tensor, tvm_ffi.Shape(tuple(tensor.shape)), tvm_ffi.dtype(dtype), 0)


def to_numpy(tensor: Any) -> np.ndarray[Any, Any]:
    """A TVM tensor as an array; it shares the memory where that is the host's."""
    tensor = on_device(tensor, host())
    dtype = str(tensor.dtype)
    if is_foreign(dtype):
        array = np.from_dlpack(_retyped(tensor, str(bits_dtype(dtype)))).view(numpy_dtype(dtype))
    else:
        array = np.from_dlpack(tensor)
    return array if array.flags.writeable else array.copy()


def flat_bytes(value: Any, name: str) -> np.ndarray[Any, Any]:
    """The bytes of an array of any library, flat and dense, shared where they are so already.

    Args:
        value: a NumPy array, or anything with DLPack; a PyTorch tensor on any device.
        name: what it is called in messages.

    Raises:
        ArgumentError: it is no such thing.
    """
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        known(array.dtype, name)
        array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))
        return array.reshape(-1).view(np.uint8)
    tensor = on_device(given(value, name), host())
    if not tensor.numel():
        return np.empty(0, np.uint8)
    plain = np.from_dlpack(_retyped(tensor, str(bits_dtype(str(tensor.dtype)))))
    return plain.reshape(-1).view(np.uint8)


def shape_and_dtype(value: Any, name: str) -> tuple[tuple[int, ...], str]:
    """The shape, and the dtype as TVM spells it, of an array of any library."""
    if isinstance(value, (np.ndarray, np.generic)):
        return tuple(value.shape), known(value.dtype, name)
    tensor = given(value, name)
    return tuple(tensor.shape), str(tensor.dtype)


def known(dtype: np.dtype[Any], name: str) -> str:
    """TVM's name of a NumPy dtype."""
    found = _name(dtype)
    if found not in SIZES:
        raise ArgumentError(f"{name}: TVM has no dtype {dtype}")
    return found


@functools.cache
def _name(dtype: np.dtype[Any]) -> str:
    return str(dtype.name)  # NumPy works it out anew each time


def given(value: Any, name: str, align: int = 0) -> Any:
    """An argument as a TVM tensor, dense and in its place; it shares the memory where it can.

    Args:
        value: a NumPy array or scalar, or anything with DLPack.
        name: what it is called in messages.
        align: see `from_bits`.

    Raises:
        ArgumentError: it is no tensor, or of a dtype or layout that cannot be taken.
    """
    if isinstance(value, (np.ndarray, np.generic)):
        return _from_numpy(np.asarray(value), name, align)
    tensor = borrowed(value, name)
    if not tensor.numel():
        return empty(tensor.shape, str(tensor.dtype), tensor.device)
    aligned = tensor.data_ptr() % max(align, SIZES.get(str(tensor.dtype), 1)) == 0
    if tensor.is_contiguous() and aligned:
        return tensor
    if not tensor.is_contiguous():
        tensor = _dense(value, tensor, name)
    if tensor.data_ptr() % max(align, SIZES[str(tensor.dtype)]):
        fresh = empty(tensor.shape, str(tensor.dtype), tensor.device)
        copy(tensor, fresh)
        return fresh
    return tensor


def _from_numpy(array: np.ndarray[Any, Any], name: str, align: int) -> Any:
    dtype = known(array.dtype, name)
    flags = array.flags
    if flags.c_contiguous and flags.writeable and array.size and array.dtype.isnative:
        address = array.__array_interface__["data"][0]
        if not is_foreign(dtype) and address % max(align, SIZES[dtype]) == 0:
            # Strides of axes of one element may be anything in NumPy.
            return tvm_ffi.from_dlpack(array.reshape(-1).reshape(array.shape))
    return from_bits(flat_bytes(array, name), array.shape, dtype, align)


def borrowed(value: Any, name: str) -> Any:
    """Another library's tensor as TVM's, of the same memory, wherever and however it lies."""
    if isinstance(value, tvm_ffi.Tensor):
        return value
    if not hasattr(value, "__dlpack__"):
        raise ArgumentError(
            f"{name}: expected a NumPy array or a tensor with DLPack, got {type(value).__name__}"
        )
    if getattr(value, "requires_grad", False) and hasattr(value, "detach"):
        value = value.detach()
    try:
        tensor = tvm_ffi.from_dlpack(value)
        dtype = str(tensor.dtype)  # fails for dtypes that TVM has no name for
    except Exception as error:
        kind = getattr(value, "dtype", "unknown dtype")
        raise ArgumentError(f"{name}: TVM cannot share its memory ({kind}): {error}") from error
    if dtype not in SIZES:
        raise ArgumentError(f"{name}: TVM has no dtype {dtype}")
    return tensor


def _dense(value: Any, tensor: Any, name: str) -> Any:
    """A copy of a strided tensor."""
    if callable(getattr(value, "contiguous", None)):
        return borrowed(value.contiguous(), name)
    if tensor.device == host() and not is_foreign(str(tensor.dtype)):
        array = np.from_dlpack(tensor)
        return from_bits(flat_bytes(array, name), array.shape, str(tensor.dtype))
    raise ArgumentError(f"{name}: it is strided, and cannot be copied; make it dense")


def write_back(result: Any, value: Any, name: str) -> None:
    """Write a result into the caller's array."""
    if isinstance(value, np.ndarray):
        value[...] = to_numpy(result)
        return
    target = borrowed(value, name)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value.detach().copy_(torch.from_dlpack(result))
    elif target.is_contiguous():
        copy(result, target)
    else:
        np.from_dlpack(target)[...] = to_numpy(result)


def spelled(shape: Sequence[Any], dtype: str) -> str:
    """A tensor in messages: ``float32[n, 4]``."""
    return f"{dtype}[{', '.join(str(size) for size in shape)}]"
