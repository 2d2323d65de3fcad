"""Operators that run in PyTorch, as packed functions of the Relax program."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.dlpack import from_dlpack

from fx2relax import recurrent_layers as recurrent_layers  # as guarded below
from fx2relax.collectives import waited
from fx2relax.compat import TVMTensor, register_global_func, remove_global_func, tvm_ffi
from fx2relax.locks import own
from fx2relax.runtime import guarded as guarded  # registers operators of programs on disk
from fx2relax.runtime.boundary import Opaque, ready
from fx2relax.runtime.owned import remember
from fx2relax.torch_calls import TorchCall


def packed(call: TorchCall) -> Callable[..., Any]:
    """The function that the Relax program calls: TVM tensors in, torch tensors out."""

    def run(*operands: Any) -> Any:
        given = operands[: len(operands) - call.extra_operands]
        return _to_tvm(*_made(call, [_to_torch(o) for o in given]))

    return run


def plain(call: TorchCall) -> Callable[..., Any]:
    """The same of PyTorch's tensors: what it returns shares no memory with an operand."""

    def run(*operands: Any) -> Any:
        return _all_apart(*_made(call, list(operands)))

    return run


def apart(result: Any, operands: Sequence[Any]) -> Any:
    """What an operator has returned as kernels take it, in memory that is no operand's."""
    given = (o for o in operands if isinstance(o, torch.Tensor))
    return _all_apart(result, {o.untyped_storage().data_ptr() for o in given})


def _all_apart(result: Any, addresses: set[int]) -> Any:
    if isinstance(result, torch.Tensor):
        return _apart(result, addresses)
    return pytree.tree_map_only(torch.Tensor, lambda r: _apart(r, addresses), result)


def _made(call: TorchCall, operands: list[Any]) -> tuple[Any, set[int]]:
    """What an operator returns, and the memory of its operands."""
    target: Any = call.target
    args, kwargs = call.arguments(operands)
    try:
        with torch.no_grad():
            result = target(*args, **kwargs)
            if call.collective:
                # Of the tensors that TVM hands on, `wait_tensor` would know nothing; and the
                # operands may lie in memory that TVM uses again.
                result = waited(result)
    except Exception as error:
        call.raised(error)  # TVM hands on a message and one of Python's own kinds
        raise
    addresses = {
        value.untyped_storage().data_ptr()
        for value in pytree.tree_leaves((args, kwargs))
        if isinstance(value, torch.Tensor)
    }
    return call.results(result), addresses


def _apart(result: torch.Tensor, addresses: set[int]) -> torch.Tensor:
    """A result as kernels take it; TVM plans memory by its own uses, and may write to operands."""
    if result.layout is not torch.strided or result.is_quantized:
        return result
    if result.numel() and result.untyped_storage().data_ptr() in addresses:
        result = result.clone()
    return ready(result)


def _to_torch(value: Any) -> Any:
    if isinstance(value, TVMTensor):
        return from_dlpack(value.__dlpack__())  # a capsule: no stream waits for itself
    if isinstance(value, tvm_ffi.Shape):
        return int(value[0])
    return value.value if isinstance(value, Opaque) else value


def _to_tvm(result: Any, addresses: set[int]) -> Any:
    if isinstance(result, (tuple, list)):
        return tuple(_to_tvm(r, addresses) for r in result)
    if isinstance(result, torch.Tensor):
        if result.layout is not torch.strided or result.is_quantized:
            return Opaque(result)
        result = _apart(result, addresses)
        if result.is_cuda:
            remember(result)
        return result
    if isinstance(result, int) and not isinstance(result, bool):
        return tvm_ffi.Shape((result,))
    return Opaque(result)


_live: dict[str, tuple[TorchCall, int]] = {}
# Those of programs that are gone. They are not forgotten on the spot: memory is collected at any
# moment, in a thread that holds the lock as well.
_gone: deque[str] = deque()
_lock = own(sys.modules[__name__], "_lock")


def register(calls: dict[str, TorchCall]) -> None:
    """Make the calls' packed functions known to TVM.

    A program that is loaded twice in one process names its calls alike: both then share them.
    """
    if not calls:
        return
    with _lock:
        for name, call in calls.items():
            known, count = _live.get(name, (call, 0))
            calls[name] = known
            _live[name] = known, count + 1
            if not count:
                register_global_func(name, packed(known))
    _forget()


def unregister(names: list[str]) -> None:
    """Forget packed functions whose programs are all gone."""
    _gone.extend(names)
    _forget()


def _forget() -> None:
    # Who finds the lock held leaves the work to its holder.
    while _gone and _lock.acquire(blocking=False):
        try:
            while _gone:
                name = _gone.popleft()
                call, count = _live.pop(name)
                if count > 1:
                    _live[name] = call, count - 1
                else:
                    remove_global_func(name)
        finally:
            _lock.release()
