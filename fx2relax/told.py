"""What the importer tells of a graph to whoever looks on."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch.fx
from torch.utils import _pytree as pytree

from fx2relax import stages
from fx2relax.complexes import Complex


def tell(importer: Any, mod: Any, nodes: Sequence[torch.fx.Node]) -> Any:
    """Tell of an imported module, as the stage "imported".

    Args:
        importer: it has imported the graph.
        mod: the module.
        nodes: the graph's.

    Returns:
        the module with variables named after their nodes.
    """
    from fx2relax.renaming import named_after_nodes  # it builds on TVM's own classes

    made = []
    for node in nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            leaves = pytree.tree_leaves(importer.env.get(node))
            parts = [p for x in leaves for p in (x.held if isinstance(x, Complex) else [x])]
            made.append((node.name, parts))
    mod, origins, results = named_after_nodes(mod, importer.name, made)
    stages.note(
        "imported",
        mod=mod,
        name=importer.name,
        origins=origins,
        results=results,
        graph=importer.graph_module,
        torch_calls=importer.calls.made,
        folded={node.name for node in importer.folded},
        declined=[(node.name, reason) for node, reason in importer.declined],
    )
    return mod
