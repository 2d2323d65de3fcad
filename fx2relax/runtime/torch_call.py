"""Operators that run in PyTorch, as packed functions of the Relax program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.dlpack import from_dlpack

from fx2relax.compat import TVMTensor, register_global_func, remove_global_func, tvm_ffi
from fx2relax.runtime.boundary import Opaque, ready
from fx2relax.torch_calls import TorchCall


def packed(call: TorchCall) -> Callable[..., Any]:
    """The function that the Relax program calls: TVM tensors in, torch tensors out."""
    target: Any = call.target

    def run(*operands: Any) -> Any:
        given = operands[: len(operands) - call.extra_operands]
        args, kwargs = call.arguments([_to_torch(o) for o in given])
        try:
            with torch.no_grad():
                result = target(*args, **kwargs)
        except Exception as error:
            call.error = error  # TVM hands on a message and one of Python's own kinds
            raise
        addresses = {
            value.untyped_storage().data_ptr()
            for value in pytree.tree_leaves((args, kwargs))
            if isinstance(value, torch.Tensor)
        }
        return _to_tvm(result, addresses)

    return run


def _to_torch(value: Any) -> Any:
    if isinstance(value, TVMTensor):
        return from_dlpack(value)
    if isinstance(value, tvm_ffi.Shape):
        return int(value[0])
    return value.value if isinstance(value, Opaque) else value


def _to_tvm(result: Any, addresses: set[int]) -> Any:
    if isinstance(result, (tuple, list)):
        return tuple(_to_tvm(r, addresses) for r in result)
    if isinstance(result, torch.Tensor):
        if result.layout is not torch.strided or result.is_quantized:
            return Opaque(result)
        # TVM plans memory by its own uses: a result must not share an operand's storage.
        if result.numel() and result.untyped_storage().data_ptr() in addresses:
            result = result.clone()
        return ready(result)
    if isinstance(result, int) and not isinstance(result, bool):
        return tvm_ffi.Shape((result,))
    return Opaque(result)


def register(calls: dict[str, TorchCall]) -> None:
    """Make the calls' packed functions known to TVM."""
    for name, call in calls.items():
        register_global_func(name, packed(call))


def unregister(names: list[str]) -> None:
    """Forget packed functions whose program is gone."""
    for name in names:
        remove_global_func(name)
