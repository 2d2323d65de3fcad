"""LSTMs in bfloat16 on a CPU where nothing is trained: oneDNN's layer, which is eager's.

It multiplies by tiles where the processor has them, which generated kernels do not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from fx2relax import onednn

LSTM = 2  # among the kinds of layers that oneDNN has
#: What a compiled program calls, see `runtime.library`.
NAME = "fx2relax.library.new_lstm"
_aten = torch.ops.aten


def takes(x: Tensor, h0: Tensor, c0: Tensor | None, params: Sequence[Tensor]) -> bool:
    """Whether eager hands layers without dropout, of which nobody asks a gradient, to oneDNN.

    Args:
        x: see `layer`.
        h0: (layers * directions, batch, size).
        c0: (layers * directions, batch, cell size), for "lstm" alone.
        params: of each layer and direction.
    """
    if c0 is None or h0.shape[-1] != c0.shape[-1] or not guard_or_false(x.numel() != 0):
        return False
    tensors = (x, h0, c0, *params)
    if any(t.device.type != "cpu" for t in tensors):
        return False
    return onednn.usable() and _in_bfloat16(tensors) and onednn.computes_in("bfloat16")


def _in_bfloat16(tensors: Sequence[Tensor]) -> bool:
    kinds = {t.dtype for t in tensors}
    if torch.is_autocast_enabled("cpu"):
        bfloat = torch.get_autocast_dtype("cpu") is torch.bfloat16
        return bfloat and kinds <= {torch.float32, torch.bfloat16}
    return kinds == {torch.bfloat16}


def layer(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weights: tuple[Tensor, Tensor],
    biases: Sequence[Tensor],
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """One direction of one layer; the outputs, the last state and the last cell's state.

    Args:
        x: (time, batch, features).
        h: (batch, size).
        c: (batch, size).
        weights: (gates, features) and (gates, size).
        biases: (gates,) twice, or none.
        reverse: from the last step to the first.
    """
    states = [state.unsqueeze(0).contiguous() for state in (h, c)]
    # Something has to stand where there are no biases, and nothing looks at it.
    given = x.contiguous(), *weights, *(biases or states), *states
    y, last_h, last_c = called(given, reverse, bool(biases))
    return y, last_h.squeeze(0), last_c.squeeze(0)


def called(tensors: Sequence[Tensor], reverse: bool, biased: bool) -> tuple[Tensor, ...]:
    """ATen's own call for one direction of one layer; its three results of `layer`.

    Args:
        tensors: the input, two weights, two biases, two states (1, batch, size).
        reverse: see `layer`.
        biased: whether the biases count.
    """
    batch_sizes: list[int] = []
    size = tensors[-1].shape[-1]
    settings = batch_sizes, LSTM, size, 1, biased, False, False, False
    made: tuple[Tensor, ...] = _aten.mkldnn_rnn_layer.default(*tensors, reverse, *settings)
    return made[:3]
