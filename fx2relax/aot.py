"""AOTAutograd, without what PyTorch's own wrapper imports of Inductor on the way.

`torch._dynamo.backends.common.aot_autograd` imports Inductor's scheduler for a log that one
environment variable asks for: sixty modules, a tenth of what a second process takes to start.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch._dynamo import disable
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import innermost_fn
from torch._dynamo.utils import counters, flatten_graph_inputs
from torch._functorch.aot_autograd import aot_module_simplified


def is_logged() -> bool:
    """Whether PyTorch is to write down what it compiles."""
    return os.environ.get("TORCH_COMPILE_DEBUG", "0") == "1"


def traced(
    graph_module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    bw_compiler: Callable[..., Any],
    **how: Any,
) -> Callable[..., Any]:
    """Trace a graph of Dynamo's to ATen's, and compile those.

    Args:
        graph_module: Dynamo's.
        inputs: its example inputs.
        bw_compiler: compiles the backward graph.
        how: what else `aot_module_simplified` takes.

    Returns:
        what runs in the graph's place.

    Raises:
        what tracing and the compilers raise.
    """
    if is_logged():
        return aot_autograd(bw_compiler=bw_compiler, **how)(graph_module, inputs)

    def apart(*arguments: Any) -> Any:
        # Neither the compiler, which may run when the graph first does, nor its result is traced.
        compiler = disable(bw_compiler, reason="the backward compiler is not traced")
        return disable(compiler(*arguments), reason="a compiled backward is not traced")

    how["bw_compiler"] = apart

    def compiled(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        made = aot_module_simplified(graph, inputs, **how)
        return untraced(made)

    counters["aot_autograd"]["total"] += 1
    try:
        nested = any(isinstance(x, (list, tuple, dict)) for x in inputs)
        if nested:
            done: Callable[..., Any] = flatten_graph_inputs(graph_module, inputs, compiled)
        else:
            done = compiled(graph_module, inputs)
    except Exception:
        counters["aot_autograd"]["not_ok"] += 1
        raise
    counters["aot_autograd"]["ok"] += 1
    return done


def called(boxed: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    """A compiled graph of inference, called as AOTAutograd would call it.

    Args:
        boxed: takes a list of the inputs, which it empties.
    """
    casts = torch._C._is_any_autocast_enabled()

    def call(*arguments: Any) -> Any:
        if not torch.is_grad_enabled() and not casts:
            return boxed(list(arguments))
        with torch.no_grad(), torch._C._DisableAutocast():
            return boxed(list(arguments))

    return untraced(call)


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled graph's function, which Dynamo calls as it is and never looks into."""
    return disable(function, reason="a compiled graph is not traced")  # type: ignore[no-any-return]


def bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """What `untraced` was given: to be called where Dynamo is off, it costs microseconds less."""
    return innermost_fn(function)


def leave_transforms(depth: int) -> None:
    """Leave the levels of `torch.func` that a trace entered before it failed.

    Args:
        depth: how many there were before.
    """
    functorch = torch._C._functorch
    while functorch.get_dynamic_layer_stack_depth() > depth:
        # PyTorch's function that leaves many removes each of them twice in torch 2.11.
        kind = functorch.peek_interpreter_stack().key().name.lower()
        getattr(functorch, f"_{'func' if kind == 'functionalize' else kind}_decrement_nesting")()
    if depth == 0:
        with contextlib.suppress(RuntimeError):  # there was no such level
            torch._C._exit_dual_level(level=0)
