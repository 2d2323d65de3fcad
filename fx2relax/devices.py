"""Where a graph's tensors are, and what is generated for there.

Nothing of CUDA is imported or asked for a graph on the processor.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from fx2relax.errors import BuildFailure
from fx2relax.switches import CUDA, cuda_asked_for

CPU = torch.device("cpu")
# Of every GPU since 2010; PyTorch does not tell it.
_THREADS = 1024


def of_graph(graph: torch.fx.GraphModule) -> torch.device:
    """The one device of a graph's tensors, with its index; the processor where it has none.

    Raises:
        BuildFailure: there are several, or nothing is generated for the one.
    """
    devices = set(_devices(graph))
    if len(devices) > 1:
        raise BuildFailure(f"tensors on several devices: {', '.join(sorted(map(str, devices)))}")
    device = next(iter(devices), CPU)
    if device.type == "cuda" and not cuda_asked_for():
        raise BuildFailure(
            f"few tests of kernels for tensors on {device} have run on a GPU; {CUDA}=1 asks for"
            " them"
        )
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and torch.version.hip):
        raise BuildFailure(f"no code generation for tensors on {device}")
    return device


def _devices(graph: torch.fx.GraphModule) -> Iterator[torch.device]:
    for node in graph.graph.nodes:
        for val in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(val, torch.Tensor):
                yield with_index(val.device)


def with_index(device: torch.device) -> torch.device:
    """The same device, with the index that it has: that of the current GPU where it names none."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def facts(device: torch.device) -> dict[str, Any] | None:
    """What a program depends on besides its graph, as `target` takes it; None for the processor."""
    return None if device.type == "cpu" else _cuda(device.index)


@functools.cache
def _cuda(index: int) -> dict[str, Any]:
    major, minor = torch.cuda.get_device_capability(index)
    properties = torch.cuda.get_device_properties(index)
    return {
        "kind": "cuda",
        "arch": f"sm_{major}{minor}",
        "max_threads_per_block": _THREADS,
        "max_num_threads": _THREADS,
        "max_shared_memory_per_block": int(properties.shared_memory_per_block),
        "thread_warp_size": int(properties.warp_size),
    }
