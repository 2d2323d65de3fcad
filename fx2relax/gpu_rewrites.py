"""What is done to a graph for a GPU before it is imported."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx

from fx2relax.gpu_epilogues import join_convolutions, join_products
from fx2relax.gpu_graphs import Rewrite
from fx2relax.gpu_layout import put_channels_last
from fx2relax.gpu_norms import fold_norms
from fx2relax.params import InputSpec


def rewritten(graph: torch.fx.GraphModule, specs: Sequence[InputSpec]) -> torch.fx.GraphModule:
    """A graph with its products and convolutions as a GPU runs them.

    Args:
        graph: a functional ATen graph of tensors on a GPU; every node carries its fake value in
            ``meta["val"]``. It is not changed.
        specs: its inputs, see `importer.import_graph`; they hold for what is returned too.

    Returns:
        a graph that computes the same with other rounding, of results that lie as they did.
        It depends on the arguments alone, and on no setting of PyTorch's.
    """
    rewrite = Rewrite(graph, specs)
    if not rewrite.weights:  # it trains
        return graph
    fold_norms(rewrite)
    join_products(rewrite)
    join_convolutions(rewrite)
    put_channels_last(rewrite)
    return rewrite.done()
