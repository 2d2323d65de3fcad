"""Transposed tensors that PyTorch's kernels on a GPU read and write where they are.

A tensor of Relax's is compact. What PyTorch would read through strides (a linear layer's weight,
channels that come last) a torch call takes as it lies, and gives to the operator as the view that
it is in the graph; a result that eager lays out in another order of its axes is returned in that
order. Neither is copied.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from fx2relax import cuda_routes
from fx2relax.collectives import is_collective
from fx2relax.compat import Expr, Var
from fx2relax.layouts import concrete, dense_permutation
from fx2relax.routes import is_plain

Order = tuple[int, ...]


def lies_freely(node: torch.fx.Node, library: bool) -> bool:
    """Whether a node's operands and results may lie in any order of their axes.

    Args:
        node: it runs in PyTorch.
        library: whether it is a call of the library that is wanted.
    """
    return library and not is_collective(node.target) and cuda_routes.on_cuda(node)


def source_of(builder: Any, bound: Any) -> tuple[Any, Order | None]:
    """What a variable is a transpose of, and the order in which that one's axes are its own.

    Of two transposes, the one after the other, only the last is looked through: the first may be
    there for the sake of how its result lies.
    """
    value: Any = builder.lookup_binding(bound) if isinstance(bound, Var) else None
    if getattr(getattr(value, "op", None), "name", "") != "relax.permute_dims":
        return bound, None
    source: Expr = value.args[0]
    axes, rank = value.attrs.axes, int(bound.ty.ndim)
    order = range(rank - 1, -1, -1) if axes is None else [int(a) % rank for a in axes]
    return (source, tuple(order)) if isinstance(source, Var) else (bound, None)


def order_of(val: Any) -> Order | None:
    """The order in which a fake tensor's axes lie, the outermost first; None where it is theirs."""
    if not isinstance(val, torch.Tensor) or not is_plain(val):
        return None
    return dense_permutation(concrete(val.shape), concrete(val.stride()))
