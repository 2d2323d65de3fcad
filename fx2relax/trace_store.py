"""What AOTAutograd made of graphs of Dynamo's, on disk: the same graph is not traced again.

A trace is kept where it is all that AOTAutograd does for a graph: one of inference on a CPU, with
no symbolic size, whose results lie in no memory but their own, and which has no effect but to write
to inputs that share none. It is found again by Dynamo's graph, its inputs, and the settings of
PyTorch that tracing asks for.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.fx
from torch._functorch import config as functorch_config
from torch._logging._internal import log_state
from torch.fx.node import _get_qualified_name
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from fx2relax import aot, cache, registry, stages
from fx2relax.compiling import client, spelling
from fx2relax.errors import target_name
from fx2relax.graph_inputs import has_subclasses, written_inputs
from fx2relax.graph_key import OURS, Spelled, process_facts
from fx2relax.layouts import storage_of
from fx2relax.literals import NoSpelling, encode, operator_name
from fx2relax.options import Options
from fx2relax.ordered import is_ordered
from fx2relax.params import InputSpec

log = logging.getLogger("fx2relax")
Node = torch.fx.Node
# Whose functions mean the same in every process with these versions.
_KNOWN = frozenset({"torch", "math", "builtins", "_operator"})


@dataclass(frozen=True)
class Traced:
    """A graph that was traced before.

    Attributes:
        graph: the ATen graph.
        written: which inputs it writes to.
    """

    graph: torch.fx.GraphModule
    written: frozenset[int]


class Trace:
    """Where the trace of a graph is kept.

    Args:
        store: among these programs.
        key: by this name.
        inputs: how many inputs the graph has.
        results: how many results.
    """

    def __init__(self, store: cache.Store, key: str, inputs: int, results: int) -> None:
        self._store, self._key = store, key
        self._inputs, self._results = inputs, results

    def find(self) -> Traced | None:
        """The trace, where there is one and its program is still there."""
        entry = self._store.get(self._key, cache.TRACE)
        if entry is None:
            return None
        try:
            if not self._store.has(entry.said["program"]):
                return None
            graph, _ = spelling.read(entry.said["graph"])
            found = Traced(graph, frozenset(map(int, entry.said["written"])))
        except Exception as error:  # whatever is wrong with it, the graph can be traced
            self._store.drop(self._key, f"{type(error).__name__}: {error}", cache.TRACE)
            return None
        stages.note("trace", event="found", key=self._key)
        return found

    def spelled(
        self,
        graph: torch.fx.GraphModule,
        specs: Sequence[InputSpec],
        metadata: Any,
    ) -> dict[str, Any] | None:
        """What `keep` keeps of a graph; None where it is not all that there is to the trace.

        Args:
            graph: the ATen graph of inference, before anything was changed in it.
            specs: its inputs.
            metadata: what AOTAutograd found out of inputs and results.
        """
        try:
            if len(specs) != self._inputs or not _is_all(metadata, specs, self._results):
                return None
            effects = any(map(_has_effect, graph.graph.nodes))
            if effects or len(_results(graph)) != self._results:
                return None
            with _disable_current_modes():  # under AOTAutograd's fake mode, constants are real
                said = spelling.spell(graph, specs)
            return {"graph": said, "written": sorted(written_inputs(metadata))}
        except Exception as error:  # whatever cannot be spelled is traced again
            log.debug("a trace is not kept: %s: %s", type(error).__name__, error)
            return None

    def keep(self, spelled: dict[str, Any], program: str) -> None:
        """Keep what `spelled` gave, with the key of the program that is compiled of it.

        Where it would be read as something else, nothing is kept.
        """
        said = spelled["graph"]
        try:
            with _disable_current_modes():
                if spelling.spell(*spelling.read(said)) != said:
                    return
        except Exception as error:
            log.debug("a trace is not kept: %s: %s", type(error).__name__, error)
            return
        about = {"nodes": len(said["nodes"])}
        entry = cache.Entry(b"", {**spelled, "program": program}, about)
        self._store.put(self._key, entry, cache.TRACE)


def trace_of(
    graph_module: torch.fx.GraphModule, inputs: Sequence[Any], options: Options
) -> Trace | None:
    """Where the trace of one of Dynamo's graphs is, or is to be; None where none is kept.

    Args:
        graph_module: the graph.
        inputs: its fake inputs.
        options: the backend's, with which its program is compiled first.
    """
    store = cache.open_store(options.cache, options.cache_size)
    if store is None or options.tune is not None:
        return None
    try:
        if _is_watched():
            return None
        text = json.dumps(
            {
                "graph": _spelled(graph_module, inputs),
                "settings": _settings(),
                "options": [options.library, options.on_unsupported, options.mode],
                # What has a converter is not taken apart.
                "converters": sorted(target_name(t) for t in registry.foreign()),
                "process": process_facts(),
            },
            sort_keys=True,
        )
    except Exception as error:  # whatever cannot be spelled is traced
        log.debug("a graph is traced: %s: %s", type(error).__name__, error)
        return None
    key = hashlib.sha256(text.encode()).hexdigest()
    return Trace(store, key, len(inputs), len(_results(graph_module)))


def _is_all(metadata: Any, specs: Sequence[InputSpec], results: int) -> bool:
    """Whether AOTAutograd does no more for a graph than to have it run."""
    of_inputs, of_outputs = metadata.input_info, metadata.output_info
    if (len(of_inputs), len(of_outputs)) != (len(specs), results):
        return False
    if any(i.mutates_metadata or i.mutates_storage_metadata for i in of_inputs):
        return False
    if metadata.mutated_inp_runtime_indices:  # the graph does not write to all of them itself
        return False
    if any(i.mutates_data for i in of_inputs):
        storages = [storage_of(s.val) for s in specs if isinstance(s.val, torch.Tensor)]
        if len(set(storages)) < len(storages):
            return False
    if any(
        o.output_type.name != "non_alias"
        or o.requires_grad
        or not issubclass(o.raw_type, torch.Tensor)
        for o in of_outputs
    ):
        return False
    return (
        metadata.num_intermediate_bases == 0
        and metadata.grad_enabled_mutation is None
        and not metadata.tokens
        and not getattr(metadata, "is_rng_op_functionalized", False)
        and not getattr(metadata, "num_graphsafe_rng_states", 0)
        and not has_subclasses(metadata)
    )


def _has_effect(node: Node) -> bool:
    """Whether a node does something else than to compute, or to write to an input at the end."""
    if node.op != "call_function" or not is_ordered(node):
        return False
    writes = node.target is torch.ops.aten.copy_.default
    return not (writes and isinstance(node.args[0], Node) and node.args[0].op == "placeholder")


def _is_watched() -> bool:
    """Whether somebody wants to see tracing, or takes part in it."""
    from torch._decomp import global_decomposition_table

    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    if depth or modes or client.is_watched():
        return True
    if log_state.artifact_names or log_state.log_qname_to_level or aot.is_logged():
        return True
    rules = (rule for table in global_decomposition_table.values() for rule in table.values())
    return any(not str(rule.__module__).startswith("torch.") for rule in rules)


def _settings() -> list[Any]:
    """What tracing asks PyTorch for, beside what every program depends on."""
    backends = torch.backends
    said = [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._is_any_autocast_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
        backends.mha.get_fastpath_enabled(),
        backends.cudnn.enabled,
        backends.mkldnn.enabled,
        getattr(backends.opt_einsum, "enabled", None),
        getattr(backends.opt_einsum, "strategy", None),
        functorch_config.get_hash().hex(),
    ]
    return [encode(each) for each in said]


def _spelled(graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """A graph of Dynamo's and its inputs."""
    said = Spelled(graph_module)
    nodes: list[Any] = []
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            value = attrgetter(str(node.target))(graph_module)
            if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter):
                raise NoSpelling(f"an attribute of type {type(value).__name__}")
            if value.numel() > spelling.LARGEST:
                raise NoSpelling("a large constant")
            what = said.attribute(value)
        elif node.op == "call_function":
            what = _function(node.target)
        elif node.op in ("call_method", "placeholder", "output"):
            what = str(node.target) if node.op == "call_method" else None
        else:
            raise NoSpelling(f"a node of the kind {node.op}")
        nodes.append([node.op, what, said.arguments(node)])
    values = []
    for each in inputs:
        plain = isinstance(each, torch.Tensor) and each.device.type == "cpu"
        if not plain or is_traceable_wrapper_subclass(each):
            raise NoSpelling("an input that is no plain tensor of the CPU's")
        values.append([said.value(each), each.is_inference()])
    if said.symbols or said.envs:
        raise NoSpelling("a symbolic size")
    return [nodes, values]


def _function(target: Any) -> str:
    """The name of a function that is the same in every process."""
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace in OURS:
            return operator_name(target)
    elif isinstance(target, torch._ops.OpOverloadPacket):
        name = target._qualified_op_name
        if name.split("::")[0] in OURS:
            return name
    elif not isinstance(target, torch._ops.HigherOrderOperator):
        name = _get_qualified_name(target)
        root, *path = name.split(".")
        if root in _KNOWN:
            found: Any = importlib.import_module(root)
            for part in path:
                found = getattr(found, part, None)
            if found is target:
                return name
    raise NoSpelling(f"a call of {target}")


def _results(graph_module: torch.fx.GraphModule) -> list[Any]:
    output = next(n for n in graph_module.graph.nodes if n.op == "output")
    return tree_leaves(output.args[0])
