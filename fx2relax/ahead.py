"""Compiled graphs that `torch.compile(...).aot_compile` saves and loads.

What is saved is Dynamo's graph, from which the program is made again when it is loaded: out of the
cache of programs where it is the same machine, TVM and PyTorch, else by compiling.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.fx
from torch._functorch import config as functorch_config

if TYPE_CHECKING:
    from torch._dynamo.aot_compile_types import SerializableCallable
else:
    try:
        from torch._dynamo.aot_compile_types import SerializableCallable
    except ImportError:  # a PyTorch that does not save compiled functions
        SerializableCallable = object

Compile = Callable[..., Callable[..., Any]]

# What `aot_compile` asks AOTAutograd's own cache for, which ours stands in for.
_ASKED = ("bundled_autograd_cache", "force_autograd_cache", "strict_autograd_cache")


def is_asked_for() -> bool:
    """Whether PyTorch compiles a function that is to be saved."""
    return bool(getattr(functorch_config, _ASKED[0], False))


def without_pytorchs_cache() -> Any:
    """Let AOTAutograd not ask for what only its own cache can save."""
    known = {name: False for name in _ASKED if hasattr(functorch_config, name)}
    return functorch_config.patch(known)


class AheadOfTime(SerializableCallable):
    """A compiled graph, and what it takes to make it again.

    Args:
        compile: from a graph, its inputs, and the settings to a function.
        graph_module: Dynamo's graph, as it was.
        inputs: its example inputs.
        settings: anything that can be pickled.
    """

    def __init__(
        self,
        compile: Compile,
        graph_module: torch.fx.GraphModule,
        inputs: Sequence[Any],
        settings: Any,
    ) -> None:
        self._compile, self._settings = compile, settings
        self._graph = _pickled(graph_module, inputs)
        with without_pytorchs_cache():
            self._compiled = compile(graph_module, inputs, settings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    @classmethod
    def serialize_compile_artifacts(cls, fn: Any) -> bytes:
        """What `deserialize_compile_artifacts` reads."""
        return pickle.dumps((fn._compile, fn._graph, fn._settings))

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> Any:
        """The function that was saved."""
        from torch._guards import TracingContext, tracing
        from torch._subclasses import FakeTensorMode
        from torch.fx._graph_pickler import GraphPickler
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        compile, graph, settings = pickle.loads(data)
        mode = FakeTensorMode(shape_env=ShapeEnv())
        graph_module: Any = GraphPickler.loads(graph, mode)
        graph_module.recompile()
        graph_module.meta.clear()  # it says that Dynamo has just made the graph
        inputs = [n.meta["val"] for n in graph_module.graph.nodes if n.op == "placeholder"]
        with tracing(TracingContext(mode)):
            return cls(compile, graph_module, inputs, settings)


def _pickled(graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> bytes:
    from torch.fx._graph_pickler import GraphPickler, Options

    noted = [(node, dict(node.meta)) for node in graph_module.graph.nodes]
    given = iter(inputs)
    try:
        for node, meta in noted:
            node.meta.clear()
            if node.op == "placeholder":
                node.meta["val"] = next(given)
            if "stack_trace" in meta:
                node.meta["stack_trace"] = meta["stack_trace"]
        return bytes(GraphPickler.dumps(graph_module, Options(ops_filter=None)))
    finally:
        for node, meta in noted:
            node.meta.clear()
            node.meta.update(meta)
