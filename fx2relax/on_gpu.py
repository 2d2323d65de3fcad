"""What stands around the program of a graph on a GPU, and not of one on the processor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx

from fx2relax.alternatives import Call
from fx2relax.first_call import Compared, can_be_compared
from fx2relax.options import Options
from fx2relax.ordered import is_ordered
from fx2relax.params import WEIGHT_KINDS, InputSpec


def on_gpu(
    call: Call,
    graph: torch.fx.GraphModule,
    specs: Sequence[InputSpec],
    device: torch.device,
    options: Options,
    *,
    replay: bool,
) -> Call:
    """A program, compared with eager at its first call, and replayed where that is wanted.

    Args:
        call: the program's.
        graph: what it was compiled from.
        specs: the graph's inputs.
        device: the GPU.
        options: the backend's.
        replay: whether calls are captured in CUDA graphs, see `runtime.cuda_graphs`. What draws
            random numbers, or has to happen at every call for another reason, is not.
    """
    if can_be_compared(graph):
        call = Compared(call, graph, device, options.on_unsupported == "raise")
    if not replay or any(n.op == "call_function" and is_ordered(n) for n in graph.graph.nodes):
        return call
    from fx2relax.runtime.cuda_graphs import Replayed

    weights = [s for s in specs if s.kind in WEIGHT_KINDS and s.position >= 0]
    tensors = [s for s in weights if isinstance(s.val, torch.Tensor)]
    frozen = [s.position for s in tensors if s.frozen]
    return Replayed(call, device, [s.position for s in tensors], frozen)
