"""`kept_call`, the higher-order operator for a call that tracing does not take apart.

Traced, it runs its function on fake tensors to learn the shapes, redispatches under
functionalisation, and leaves one node. Under autograd the backward differentiates the function
itself, so that the backward graph is made of ATen operators.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    track_tensor_tree,
)

from fx2relax.errors import target_name
from fx2relax.kept_probe import Findings, probe, storage_of
from fx2relax.module_view import ModuleView, functional_call
from fx2relax.registry import Converter

_numbers = itertools.count(1)
_live: weakref.WeakValueDictionary[int, KeptCall] = weakref.WeakValueDictionary()
_OPERAND = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class Slot:
    """Stands for an operand in the arguments of a kept call."""

    index: int


class Token(int):
    """The number of a kept call, which keeps that call alive for as long as a graph holds it."""

    call: KeptCall

    def __deepcopy__(self, memo: Any) -> Token:
        return self


@dataclass(frozen=True)
class Callee:
    """What a place in a graph calls.

    Attributes:
        target: the graph's own: a function, a method name, or the module's class.
        converter: whose target is that, an alias of it or a base class.
        module: the module that is called, if it is one.
        weights: names of its parameters and buffers.
        name: a readable name for the result.
    """

    target: Any
    converter: Converter
    module: torch.nn.Module | None
    weights: tuple[str, ...]
    name: str


class KeptCall:
    """One call that is kept whole: what was called, with what, and who converts it.

    Attributes:
        target: the Python function, Tensor method name or module class, as registered.
        converter: the one in force when the call was captured.
        module: the module that was called; None for functions and methods.
        weights: names of the module's parameters and buffers, in the order of their operands,
            which come before those of the arguments.
        out_spec: the structure of the result (a pytree), known once the call has been traced.
        name: a readable name for the result.
    """

    def __init__(
        self,
        callee: Callee,
        weights: Sequence[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.callee = callee
        self.converter = callee.converter
        self.target = callee.converter.target
        self.module = callee.module
        self.weights = callee.weights
        self.name = callee.name
        self.number = next(_numbers)
        self.out_spec: pytree.TreeSpec | None = None
        self._static: dict[int, Any] = {}
        self.operands: tuple[Any, ...] = ()  # dropped once the call is made
        leaves, self._in_spec = pytree.tree_flatten((args, kwargs))
        operands = list(weights)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, _OPERAND):
                leaves[index] = Slot(len(operands))
                operands.append(leaf)
        self._leaves = leaves
        self.operands = tuple(operands)
        self._autocast = _autocast_state(operands)
        _live[self.number] = self

    @property
    def token(self) -> Token:
        """A number that graphs may hold; `kept` finds the call by it."""
        token = Token(self.number)
        token.call = self
        return token

    def arguments(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's ``(args, kwargs)``, less the module, with values in place of operands."""
        filled = [values[v.index] if isinstance(v, Slot) else v for v in self._leaves]
        args, kwargs = pytree.tree_unflatten(filled, self._in_spec)
        return tuple(args), dict(kwargs)

    def bind(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for the converter.

        Args:
            values: one Relax expression per operand.

        Returns:
            ``(args, kwargs)`` as the user's code called the target; for a module ``args[0]`` is
            a `ModuleView` whose parameters and buffers are the values.
        """
        args, kwargs = self.arguments(values)
        if self.module is not None:
            named = dict(zip(self.weights, values, strict=False))
            return (ModuleView(self.module, named), *args), kwargs
        return args, kwargs

    def run(self, *operands: Any) -> Any:
        """Call the target eagerly; returns what it returns."""
        args, kwargs = self.arguments(operands)
        with self._autocast(), _running():
            if self.module is not None:
                state = dict(zip(self.weights, operands, strict=False))
                return functional_call(self.module, state, args, kwargs)
            if isinstance(self.callee.target, str):
                return getattr(args[0], self.callee.target)(*args[1:], **kwargs)
            return self.callee.target(*args, **kwargs)

    def function(self, *operands: Any) -> tuple[Any, ...]:
        """Call the target eagerly; returns the tensors and symbolic sizes among its results.

        None of them shares memory with an operand or with another result: the operators of a
        traced graph are functions of values, and later passes rely on it.
        """
        flat, self.out_spec = pytree.tree_flatten(self.run(*operands))
        self._static = {i: v for i, v in enumerate(flat) if not isinstance(v, _OPERAND)}
        dynamic = [v for v in flat if isinstance(v, _OPERAND)]
        seen = {storage for v in operands if (storage := storage_of(v)) is not None}
        for index, value in enumerate(dynamic):
            storage = storage_of(value)
            if storage is None:
                continue
            if storage in seen:
                dynamic[index] = torch.clone(value)  # type: ignore[arg-type]
            seen.add(storage)
        return tuple(dynamic)

    def result(self, flat: Sequence[Any]) -> Any:
        """What the target returned, from the flat results of `function`."""
        assert self.out_spec is not None, "a kept call has no result before it has run"
        values = iter(flat)
        count = self.out_spec.num_leaves
        leaves = [self._static[i] if i in self._static else next(values) for i in range(count)]
        return pytree.tree_unflatten(leaves, self.out_spec)

    def flatten(self, result: Any) -> list[Any]:
        """A converter's result (nested tuples and lists) in the order of `function`'s.

        Constants that the target returns beside its tensors may be given or left out.
        """
        flat = pytree.tree_leaves(result, is_leaf=lambda v: not isinstance(v, (tuple, list, dict)))
        if self.out_spec is not None and len(flat) == self.out_spec.num_leaves:
            flat = [v for i, v in enumerate(flat) if i not in self._static]
        return flat


def kept(token: int) -> KeptCall:
    """The call that a `kept_call` node's first argument names."""
    call = token.call if isinstance(token, Token) else _live.get(int(token))
    if call is None:
        raise KeyError(f"kept call {int(token)} is gone: the graph that held it was collected")
    return call


_depth = contextvars.ContextVar("fx2relax_kept_depth", default=0)


@contextlib.contextmanager
def _running() -> Iterator[None]:
    token = _depth.set(_depth.get() + 1)
    try:
        yield
    finally:
        _depth.reset(token)


def inside_kept() -> bool:
    """Whether a kept call's own function is running: what it calls is not kept in turn."""
    return _depth.get() > 0


def _autocast_state(operands: Sequence[Any]) -> Callable[[], Any]:
    """A context that restores the autocast state of now, for the backward's recomputation."""
    kinds = {v.device.type for v in operands if isinstance(v, torch.Tensor)} - {"meta"}
    states = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in sorted(kinds)
        if torch.amp.is_autocast_available(kind)
    ]

    def restore() -> Any:
        stack = contextlib.ExitStack()
        for kind, enabled, dtype in states:
            if enabled != torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        return stack

    return restore


class KeptCallOperator(HigherOrderOperator):
    """``kept_call(token, *operands) -> tuple of tensors``: see `KeptCall.function`."""

    def __init__(self) -> None:
        super().__init__("fx2relax_kept_call")  # type: ignore[no-untyped-call]

    def __call__(self, token: int, *operands: Any) -> tuple[Any, ...]:
        result: tuple[Any, ...] = super().__call__(token, *operands)  # type: ignore[no-untyped-call]
        return result


kept_call = KeptCallOperator()


@kept_call.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)
def _eager(token: int, *operands: Any) -> Any:
    return kept(token).function(*operands)


@kept_call.py_impl(FakeTensorMode)
def _fake(mode: FakeTensorMode, token: int, *operands: Any) -> Any:
    with mode:
        return kept(token).function(*operands)


@kept_call.py_functionalize_impl
def _functional(ctx: Any, token: int, *operands: Any) -> Any:
    with ctx.redispatch_to_next():
        out = kept_call(token, *ctx.unwrap_tensors(operands))
    return ctx.wrap_tensors(out)


@kept_call.py_impl(ProxyTorchDispatchMode)
def _traced(mode: ProxyTorchDispatchMode, token: int, *operands: Any) -> Any:
    call = kept(token)
    tracer: Any = mode.tracer
    proxies = pytree.tree_map(tracer.unwrap_proxy, operands)
    # The node holds a Token, not a plain number, so that the call lives as long as the graph.
    proxy = tracer.create_proxy(
        "call_function", kept_call, (call.token, *proxies), {}, name=call.name
    )
    with disable_proxy_modes_tracing():
        out = kept_call(token, *operands)
    return track_tensor_tree(out, proxy, constant=None, tracer=tracer)


class _KeptCallAutograd(torch.autograd.Function):
    """Forward keeps the call whole; backward differentiates the function as PyTorch does."""

    @staticmethod
    def forward(ctx: Any, token: Token, *operands: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.token = token
        tensors = [v for v in operands if isinstance(v, torch.Tensor)]
        ctx.others = [None if isinstance(v, torch.Tensor) else v for v in operands]
        ctx.save_for_backward(*tensors)
        with torch._C._AutoDispatchBelowAutograd():
            out = kept_call(token, *operands)
        plain = (v for v in out if isinstance(v, torch.Tensor))
        ctx.mark_non_differentiable(
            *(v for v in plain if not (v.is_floating_point() or v.is_complex()))
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved = iter(ctx.saved_tensors)
        needs = ctx.needs_input_grad[1:]
        again = torch.is_grad_enabled()  # the gradient will be differentiated in turn

        def operand(value: torch.Tensor, need: bool) -> torch.Tensor:
            # An alias, so that a derivative by one operand takes no way through another.
            return value.view_as(value) if again else value.detach().requires_grad_(need)

        with torch.enable_grad():
            operands = [
                operand(next(saved), need) if other is None else other
                for other, need in zip(ctx.others, needs, strict=True)
            ]
            results = ctx.token.call.function(*operands)
        pairs = [
            (v, g)
            for v, g in zip(results, grads, strict=True)
            if g is not None and isinstance(v, torch.Tensor) and v.requires_grad
        ]
        wanted = [v for v, need in zip(operands, needs, strict=True) if need]
        if not pairs:
            return (None,) * (1 + len(operands))
        found = iter(
            torch.autograd.grad(
                [v for v, _ in pairs],
                wanted,
                [g for _, g in pairs],
                allow_unused=True,
                create_graph=again,
            )
        )
        return (None, *(next(found) if need else None for need in needs))


@kept_call.py_autograd_impl
def _autograd(token: int, *operands: Any) -> Any:
    return _KeptCallAutograd.apply(kept(token).token, *operands)  # type: ignore[no-untyped-call]


def weight_names(module: torch.nn.Module) -> list[str]:
    """The names of a module's parameters and buffers; a tied weight has all of its names."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    return names + [name for name, _ in module.named_buffers(remove_duplicate=False)]


def call_site(callee: Callee, writes_later: bool) -> Callable[..., Any]:
    """A function for a graph node to call in place of the callee.

    It takes the module's weights and then the callee's own arguments, makes the kept call and
    returns what the callee returns; where a kept call would not be sound, it calls the callee.

    Args:
        callee: what is called.
        writes_later: whether a later node may write to a tensor in place.
    """

    def call(*values: Any, **kwargs: Any) -> Any:
        split = len(callee.weights)
        made = KeptCall(callee, values[:split], values[split:], kwargs)
        operands, made.operands = made.operands, ()
        reason = _unsound(probe(made.run, operands), operands, writes_later)
        if reason:
            warn_not_kept(callee.converter, "", reason)
            return made.run(*operands)
        return made.result(kept_call(made.token, *operands))

    call.__name__ = call.__qualname__ = f"kept_{callee.name}"
    call.callee = callee  # type: ignore[attr-defined]
    return call


def warn_not_kept(converter: Converter, where: str, reason: str) -> None:
    """Say that a call is taken apart by PyTorch although it has a converter."""
    at = f" at {where}" if where else ""
    warnings.warn(
        f"{target_name(converter.target)}{at} is not kept whole and its converter is not used: "
        f"{reason}",
        stacklevel=3,
    )


def _unsound(found: Findings, operands: Sequence[Any], writes_later: bool) -> str:
    """Why a call may not be kept, or an empty string."""
    if found.writes:
        return f"the call writes to its arguments or buffers ({found.writes})"
    gradients = torch.is_grad_enabled() and any(
        v.requires_grad for v in operands if isinstance(v, torch.Tensor)
    )
    if found.random and gradients:
        return f"it draws random numbers ({found.random}), which the backward would draw anew"
    if found.aliases and writes_later:
        return "it returns a view, and the graph writes in place later"
    return ""
