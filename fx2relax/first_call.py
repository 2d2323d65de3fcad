"""The first call of a program for a GPU runs in PyTorch as well, and both results are compared.

Few tests of kernels for GPUs have run on one: a program that is wrong is found here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from fx2relax.alternatives import Call
from fx2relax.errors import ArgumentError, BuildFailure
from fx2relax.locks import own
from fx2relax.ordered import is_repeatable
from fx2relax.reproducers import write_reproducer

log = logging.getLogger("fx2relax")

# Of the largest number of a result, how far a number may be from eager's: sums are made in another
# order, and convolutions round float32 to 10 bits (TF32) unless told not to. What has one line
# wrong is further off.
_APART = {torch.float64: 1e-7, torch.float32: 1e-2, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# Where so little as rounding the arguments otherwise moves eager's own results further, that is how
# far a program's may be: a deep net of random weights multiplies what halves round.
_TIMES = 4
# Which index or truth value comes out of numbers that are nearly equal is up to rounding.
_UNEQUAL = 0.01


class Compared:
    """A program as a function of a tuple of arguments.

    Args:
        call: the program's.
        graph: what it was compiled from; it can be run without a trace, but for random draws.
        device: where its tensors are.
        strict: whether a program that is wrong raises, in the place of a warning.
    """

    def __init__(
        self, call: Call, graph: torch.fx.GraphModule, device: torch.device, strict: bool
    ) -> None:
        self._call, self._graph, self._device, self._strict = call, graph, device, strict
        self._settled: Call | None = None
        self._lock = own(self, "_lock")

    def __call__(self, arguments: Sequence[Any]) -> Any:
        """Run the program, and PyTorch beside it the first time.

        Raises:
            BuildFailure: the program is wrong, and is asked to be right.
        """
        settled = self._settled
        if settled is not None:
            return settled(arguments)
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self._call(arguments)
        with self._lock:
            if self._settled is not None:  # by another thread
                return self._settled(arguments)
            return self._first(arguments)

    def _eager(self, arguments: Sequence[Any]) -> Any:
        return torch.fx.Interpreter(self._graph).run(*arguments)

    def _first(self, arguments: Sequence[Any]) -> Any:
        draws = _Draws(self._device)
        wrong: str | None
        try:
            found = self._call(arguments)
            _wait(self._device)
        except ArgumentError:
            raise
        except Exception as error:
            expected = draws.again(lambda: self._eager(arguments))  # it may have the same to say
            wrong = f"it raised {type(error).__name__}: {error}"
        else:
            try:
                expected = draws.again(lambda: self._eager(arguments))
            except torch.OutOfMemoryError:
                log.info("there is no memory for a second result: a program is not compared")
                self._settled = self._call
                return found
            wrong = difference(found, expected)
            if wrong is not None:
                wrong = self._beyond_rounding(arguments, found, expected, draws)
        if wrong is None:
            self._settled = self._call
            return found
        failure = BuildFailure(f"a program on {self._device} is not as eager: {wrong}")
        if self._strict:
            raise failure
        log.warning(
            "a graph of %d nodes runs in PyTorch: %s\n  reproducer: %s",
            len(self._graph.graph.nodes),
            failure,
            write_reproducer(self._graph, failure),
        )
        self._settled = self._eager
        return expected

    def _beyond_rounding(
        self, arguments: Sequence[Any], found: Any, expected: Any, draws: _Draws
    ) -> str | None:
        """How results differ by more than eager's own do when arguments are rounded otherwise."""
        try:
            near = draws.again(lambda: self._eager(list(map(_rounded_otherwise, arguments))))
        except Exception as error:  # it takes no other arguments, or there is no memory for them
            log.info("how much rounding matters is not known: %s", error)
            near = expected
        return difference(found, expected, near)


def _rounded_otherwise(value: Any) -> Any:
    """A tensor of numbers that are one unit in the last place away, up or down."""
    if not isinstance(value, torch.Tensor) or value.dtype not in _APART or not value.numel():
        return value
    if value.layout is not torch.strided:
        return value
    value = value.detach()
    unit = torch.finfo(value.dtype).eps
    signs = torch.arange(value.numel(), device=value.device).view(value.shape)
    return value + value * torch.where(signs % 3 == 1, unit, -unit).to(value.dtype)


def can_be_compared(graph: torch.fx.GraphModule) -> bool:
    """Whether a graph can run a second time with no more than the same random draws."""
    return all(is_repeatable(node) for node in graph.graph.nodes)


def difference(found: Any, expected: Any, near: Any = None) -> str | None:
    """How results differ by more than rounding, in words; None where they do not.

    Args:
        found: tensors and numbers, in tuples and lists.
        expected: the same, eager's.
        near: the same, eager's of arguments that were rounded otherwise.
    """
    ours, theirs = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    others = pytree.tree_leaves(near)
    if near is None or list(map(_kind, others)) != list(map(_kind, theirs)):
        others = theirs
    if len(ours) != len(theirs):
        return f"{len(ours)} results in the place of {len(theirs)}"
    for place, (a, b, c) in enumerate(zip(ours, theirs, others, strict=True)):
        if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor):
            return f"result {place} is {type(a).__name__} in the place of {type(b).__name__}"
        if isinstance(b, torch.Tensor):
            why = _apart(a.detach(), b.detach(), c.detach())
            if why is not None:
                return f"result {place} {why}"
        elif a != b and not isinstance(b, float):
            return f"result {place} is {a!r} in the place of {b!r}"
    return None


def _kind(value: Any) -> Any:
    return value.shape if isinstance(value, torch.Tensor) else type(value)


def _apart(a: torch.Tensor, b: torch.Tensor, near: torch.Tensor) -> str | None:
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return f"is {tuple(a.shape)} {a.dtype} on {a.device}, eager's {tuple(b.shape)} {b.dtype}"
    if b.layout is not torch.strided or b.is_quantized or not b.numel():
        return None
    if b.is_complex():
        a, b, near = (torch.view_as_real(x.resolve_conj()) for x in (a, b, near))
    limit = _APART.get(b.dtype)
    if limit is None:
        unequal = float(((a != b) & (near == b)).double().mean())
        return None if unequal <= _UNEQUAL else f"has {unequal:.0%} of its elements unequal"
    a, b, near = a.double(), b.double(), near.double()
    finite = b.isfinite()
    elsewhere = (a.isfinite() != finite) | (a.isnan() != b.isnan())
    unequal = float(elsewhere.double().mean())
    if unequal > _UNEQUAL:
        return f"has {unequal:.0%} of its NaNs and infinities elsewhere"
    both = finite & a.isfinite()
    zero = torch.zeros((), dtype=torch.float64, device=b.device)
    largest = float(torch.where(both, b, zero).abs().max())
    apart = float(torch.where(both, a - b, zero).abs().max())
    spread = float(torch.where(both & near.isfinite(), near - b, zero).abs().max())
    # Tiny results are sums of what cancels.
    right = apart <= max(limit * max(largest, 1e-2), _TIMES * spread)
    return None if right else f"is off by {apart:.3g} of {largest:.3g}"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class _Draws:
    """The random numbers from here on, to be drawn a second time."""

    def __init__(self, device: torch.device) -> None:
        self._gpus = [device] if device.type == "cuda" else []
        self._states = [torch.cuda.get_rng_state(gpu) for gpu in self._gpus]
        self._state = torch.get_rng_state()

    def again(self, function: Callable[[], Any]) -> Any:
        """Call a function with them, and go on after the first draws."""
        with torch.random.fork_rng([gpu.index for gpu in self._gpus]):
            torch.set_rng_state(self._state)
            for gpu, state in zip(self._gpus, self._states, strict=True):
                torch.cuda.set_rng_state(state, gpu)
            return function()
