"""The inputs of a graph that AOTAutograd traced."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch._guards import TracingContext

from fx2relax.effects import drop_tokens
from fx2relax.layouts import concrete, dense_permutation
from fx2relax.params import InputSpec
from fx2relax.routes import is_held


def metadata_of_trace() -> Any:
    """What AOTAutograd found out of the inputs and results of the graph that it traces."""
    context = TracingContext.try_get()
    return context.fw_metadata if context is not None else None


def written_inputs(metadata: Any) -> frozenset[int]:
    """Which inputs a graph writes to."""
    infos = metadata.input_info if metadata is not None else []
    return frozenset(i for i, info in enumerate(infos) if info.mutates_data)


def has_subclasses(metadata: Any) -> bool:
    """Whether inputs or results have a tensor class of their own: a graph has their parts."""
    metas = (*metadata.subclass_inp_meta, *metadata.subclass_fw_graph_out_meta)
    return any(type(meta).__name__ == "SubclassCreationMeta" for meta in metas)


def plain_specs(graph: torch.fx.GraphModule) -> list[InputSpec]:
    """The inputs of an ATen graph, none of them a weight."""
    drop_tokens(graph)
    specs = []
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    for position, node in enumerate(placeholders):
        val = node.meta.get("val")
        spec = InputSpec(str(node.target), "user", val, position=position)
        if isinstance(val, torch.Tensor) and is_held(val):
            spec.permutation = dense_permutation(concrete(val.shape), concrete(val.stride()))
        specs.append(spec)
    return specs
