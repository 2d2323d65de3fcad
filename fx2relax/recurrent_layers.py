"""Recurrent layers on a GPU where nothing is trained: all of them in one call, cuDNN's in PyTorch.

Importing this module registers ``fx2relax::recurrent_layers``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_OPERATORS: dict[str, Any] = {
    "lstm": _aten.lstm.input,
    "gru": _aten.gru.input,
    "tanh": _aten.rnn_tanh.input,
    "relu": _aten.rnn_relu.input,
}


@torch.library.custom_op(
    "fx2relax::recurrent_layers",
    mutates_args=(),
    schema="(Tensor x, Tensor h0, Tensor? c0, Tensor[] params, str mode, bool has_biases, "
    "int num_layers, bool bidirectional) -> Tensor[]",
)
def recurrent_layers(
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    params: Sequence[Tensor],
    mode: str,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
) -> list[Tensor]:
    """ATen's recurrent layers, without dropout.

    Args:
        x: (time, batch, features).
        h0: (layers * directions, batch, size); of the same dtype, as all that follow.
        c0: (layers * directions, batch, cell size), for "lstm" alone.
        params: of each layer and direction, in PyTorch's order.
        mode: "lstm", "gru", "tanh" or "relu".
        has_biases: whether each has two biases.
        num_layers: how many there are.
        bidirectional: whether there are two directions.

    Returns:
        the outputs (time, batch, directions * size), the last states, for "lstm" the cells' too.
    """
    states = h0 if c0 is None else (h0, c0)
    settings = has_biases, num_layers, 0.0, False, bidirectional, False
    found = _OPERATORS[mode](x, states, list(params), *settings)
    return [tensor.contiguous() for tensor in found]


@recurrent_layers.register_fake
def _(
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    params: Sequence[Tensor],
    mode: str,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
) -> list[Tensor]:
    y = x.new_empty([*x.shape[:-1], h0.shape[-1] * (1 + bidirectional)])
    return [y, *(x.new_empty(state.shape) for state in (h0, c0) if state is not None)]
