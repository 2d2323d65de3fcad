"""Nodes that `runtime.library` computes whole, where there is a converter for all other cases."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from fx2relax.compat import TupleType, op, relax
from fx2relax.complexes import held_type
from fx2relax.recurrent_library import LSTM, NAME
from fx2relax.registry import Converter, shipped
from fx2relax.routes import plain_node

_TENSORS = 7  # input, two weights, two biases, two states


def takes(node: torch.fx.Node, converter: Converter | None) -> bool:
    """Whether a node is an LSTM's layer that oneDNN computes faster, and no user has another way.

    Its kernels are faster in bfloat16 alone.
    """
    own = converter is None or shipped(converter)
    if node.target is not torch.ops.aten.mkldnn_rnn_layer.default or not own:
        return False
    values = [a.meta["val"] for a in node.args[:_TENSORS] if isinstance(a, torch.fx.Node)]
    _, sizes, mode, _, layers, _, *flags = node.args[_TENSORS:]
    return (
        plain_node(node)
        and len(values) == _TENSORS
        and {v.dtype for v in values} == {torch.bfloat16}
        and (mode, layers, sizes, any(flags)) == (LSTM, 1, [], False)
    )


def emit(importer: Any, node: torch.fx.Node) -> tuple[Any, ...]:
    """Emit the call of such a node; its results."""
    operands = [importer.env[a] for a in node.args[:_TENSORS]]
    reverse, biased = node.args[_TENSORS], node.args[_TENSORS + 5]
    settings = relax.ShapeExpr([int(bool(reverse)), int(bool(biased))])
    *values, _ = node.meta["val"]
    types = [held_type(val, list(importer.symbols.shape(val.shape))) for val in values]
    call = op.call_pure_packed(NAME, *operands, settings, ty_args=[TupleType(types)])
    made = importer.builder.emit(call, node.name)
    workspace = op.zeros(relax.ShapeExpr([0]), "uint8")
    return *(relax.TupleGetItem(made, i) for i in range(len(types))), workspace
