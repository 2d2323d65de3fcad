"""What a call does beside computing its results, learnt by running it on fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import disable_functional_mode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# Their schemas do not say that they write the running statistics (arguments 3 and 4) when they
# train (argument 5).
_BATCH_NORMS = (
    aten.native_batch_norm.default,
    aten.cudnn_batch_norm.default,
    aten.miopen_batch_norm.default,
)


@dataclass
class Findings:
    """What a call was seen to do.

    Attributes:
        writes: the operator that wrote to an operand, or ``""``.
        random: the operator that drew random numbers, or ``""``.
        aliases: a result shares memory with an operand or with another result.
    """

    writes: str = ""
    random: str = ""
    aliases: bool = False


def storage_of(value: Any) -> int | None:
    """A number that tensors sharing memory have in common; None for what has no memory."""
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return int(value.untyped_storage()._cdata)
    except NotImplementedError:  # sparse and opaque tensors
        return None


class _Watch(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, operands: Sequence[Any], found: Findings) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = {s for v in operands if (s := storage_of(v)) is not None}
        self.found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload):
            if _draws(func, args, kwargs):
                self.found.random = self.found.random or str(func)
            if any(storage_of(v) in self.storages for v in _written(func, args, kwargs)):
                self.found.writes = self.found.writes or str(func)
        return func(*args, **kwargs)


def _given(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of an overload by name."""
    return dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws random numbers; attention and LSTMs do where they drop out."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    given = defaults | _given(func, args, kwargs)
    rates = [given[name] for name in ("dropout_p", "dropout") if name in given]
    return not rates or any(rate != 0 for rate in rates)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that a call of an overload writes to."""
    if func in _BATCH_NORMS:
        return [v for v in args[3:5] if v is not None] if args[5] else []
    if not func._schema.is_mutable:
        return []
    given = _given(func, args, kwargs)
    return [
        leaf
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for leaf in pytree.tree_leaves(given.get(argument.name))
        if isinstance(leaf, torch.Tensor)
    ]


def fake_copies(mode: FakeTensorMode, operands: Sequence[Any]) -> list[Any]:
    """New fake tensors with the shapes, strides, dtypes and devices of the operands."""
    with mode:
        return [
            torch.empty_strided(
                v.shape, v.stride(), dtype=v.dtype, device=v.device, requires_grad=False
            )
            if isinstance(v, torch.Tensor)
            else v
            for v in operands
        ]


@contextlib.contextmanager
def outside_tracing(mode: FakeTensorMode) -> Any:
    """Suspend tracing and functionalisation, and keep fresh data-dependent symbols to ourselves."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(disable_functional_mode())
        stack.enter_context(disable_proxy_modes_tracing())
        stack.enter_context(torch.no_grad())
        stack.enter_context(enable_python_dispatcher())  # symbolic sizes need its kernels
        if mode.shape_env is not None:
            stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        yield


def probe(function: Callable[..., Any], operands: Sequence[Any]) -> Findings:
    """Run a function on fake copies of its operands and report what it does to them."""
    found = Findings()
    mode = detect_fake_mode(list(operands)) or FakeTensorMode(allow_non_fake_inputs=True)
    with outside_tracing(mode):
        fakes = fake_copies(mode, operands)
        watch = _Watch(fakes, found)
        with mode, watch:
            results = [v for v in pytree.tree_leaves(function(*fakes)) if torch.is_tensor(v)]
    storages = [s for v in results if (s := storage_of(v)) is not None]
    found.aliases = len(set(storages)) < len(storages) or bool(watch.storages & set(storages))
    return found
