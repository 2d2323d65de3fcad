"""What AOTAutograd calls: a graph's program, or PyTorch in its place, by its convention."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch.fx

from fx2relax import report
from fx2relax.alternatives import Call
from fx2relax.errors import ArgumentError

log = logging.getLogger("fx2relax")


def guarded(direct: Call, graph: torch.fx.GraphModule) -> Callable[[tuple[Any, ...]], Any]:
    """A program, and PyTorch for a call whose arguments the graph was not compiled for.

    Dynamo's guards let through what the ATen graph does not say: AOTAutograd may hand over the
    whole storage of inputs that overlap, larger than what it traced.
    """

    def call(arguments: tuple[Any, ...]) -> Any:
        try:
            return direct(arguments)
        except ArgumentError as error:
            log.warning("a call runs in PyTorch: %s", error)
            return torch.fx.Interpreter(graph).run(*arguments)

    return call


def of_tuple(function: Callable[..., Any]) -> Call:
    """A function of arguments as one of their tuple."""
    return lambda arguments: function(*arguments)


def boxed(function: Callable[[tuple[Any, ...]], Any]) -> Callable[[list[Any]], Any]:
    """AOTAutograd's calling convention: one list, emptied so that its tensors can be freed."""
    counters = report.counters

    def call(arguments: list[Any]) -> Any:
        counters.called()
        values = tuple(arguments)
        arguments.clear()
        return function(values)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
