"""Recurrent layers that stay whole while PyTorch traces them.

ATen has no operator for one direction of one recurrent layer that has a gradient of its own:
PyTorch traces a training step, and every GRU, cell by cell, hundreds of nodes for a sentence, and
leaves out the dropout between layers. Here a layer is one matrix product over all time steps and
one `fx2relax::recurrence`, whose gradient is one `fx2relax::recurrence_backward`. Where nothing is
trained, all layers on a GPU are one `fx2relax::recurrent_layers`, and LSTMs in bfloat16 on a CPU
are calls of oneDNN's, see `recurrent_library`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DispatchKey
from torch.fx.experimental.symbolic_shapes import guard_or_false

from fx2relax import recurrent_library
from fx2relax.recurrent_cells import backward_cell, forward_cell, saved_widths
from fx2relax.recurrent_layers import recurrent_layers
from fx2relax.whole import is_active

__all__ = ["recurrence", "recurrence_backward"]

aten = torch.ops.aten


@torch.library.custom_op(
    "fx2relax::recurrence",
    mutates_args=(),
    schema="(Tensor x, Tensor h0, Tensor? c0, Tensor weight, Tensor? bias, Tensor? projection, "
    "Tensor? batch_sizes, str mode, bool reverse, bool keep) -> Tensor[]",
)
def _recurrence(
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor | None,
    batch_sizes: Tensor | None,
    mode: str,
    reverse: bool,
    keep: bool,
) -> list[Tensor]:
    """The time steps of one direction of one layer.

    Args:
        x: the input's share of the gates, (time, batch, gates); packed, (all rows, gates).
        h0: (batch, size).
        c0: the cell's first state, for "lstm" alone.
        weight: (gates, size), what the state is multiplied by.
        bias: (gates,).
        projection: (smaller size, size), for "lstm" alone.
        batch_sizes: how many sequences reach each time step, of packed input.
        mode: "lstm", "gru", "tanh" or "relu".
        reverse: from the last step to the first.
        keep: also give what the gradient needs.

    Returns:
        the outputs, the last state, for "lstm" the last cell's state; with `keep` the gates, the
        states before each step and, for "lstm", the cells' states before each step.
    """
    y = x.new_empty([*x.shape[:-1], h0.shape[1]])
    kept = [x.new_empty([*x.shape[:-1], n]) for n in saved_widths(mode, weight, h0, c0)]
    h, c = h0.clone(), c0.clone() if c0 is not None else None
    for part, count in _steps(x, batch_sizes, reverse):
        state = h[:count], None if c is None else c[:count]
        z = F.linear(state[0], weight, bias)
        new_h, new_c, gates = forward_cell(mode, x[part], z, *state)
        for held, value in zip(kept, (gates, *state), strict=False):
            assert value is not None
            held[part] = value
        h[:count] = new_h if projection is None else F.linear(new_h, projection)
        if c is not None and new_c is not None:
            c[:count] = new_c
        y[part] = h[:count]
    return [y, h, *([] if c is None else [c]), *(kept if keep else [])]


def _steps(x: Tensor, batch_sizes: Tensor | None, reverse: bool) -> list[tuple[Any, int]]:
    """Where in `x` each time step is and how many sequences reach it, in the order they run."""
    steps: list[tuple[Any, int]] = []
    if batch_sizes is None:
        steps = [(t, x.shape[1]) for t in range(x.shape[0])]
    else:
        start = 0
        for count in batch_sizes.tolist():
            steps.append((slice(start, start + count), count))
            start += count
    return steps[::-1] if reverse else steps


@_recurrence.register_fake
def _(
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor | None,
    batch_sizes: Tensor | None,
    mode: str,
    reverse: bool,
    keep: bool,
) -> list[Tensor]:
    lead = x.shape[:-1]
    results = [x.new_empty([*lead, h0.shape[1]]), x.new_empty(h0.shape)]
    results += [] if c0 is None else [x.new_empty(c0.shape)]
    if keep:
        results += [x.new_empty([*lead, n]) for n in saved_widths(mode, weight, h0, c0)]
    return results


@torch.library.custom_op(
    "fx2relax::recurrence_backward",
    mutates_args=(),
    schema="(Tensor grad_y, Tensor grad_h, Tensor? grad_c, Tensor[] kept, Tensor weight, "
    "Tensor? projection, Tensor? batch_sizes, str mode, bool reverse) -> Tensor[]",
)
def _recurrence_backward(
    grad_y: Tensor,
    grad_h: Tensor,
    grad_c: Tensor | None,
    kept: Sequence[Tensor],
    weight: Tensor,
    projection: Tensor | None,
    batch_sizes: Tensor | None,
    mode: str,
    reverse: bool,
) -> list[Tensor]:
    """The gradient of `recurrence`, from what it kept.

    Returns:
        the gradients of x and h0, for "lstm" that of c0, and with a projection those of each
        step's output, the later steps' share included.
    """
    grad_x = grad_y.new_empty([*grad_y.shape[:-1], weight.shape[0]])
    totals = torch.empty_like(grad_y)
    dh, dc = grad_h.clone(), grad_c.clone() if grad_c is not None else None
    for part, count in _steps(grad_y, batch_sizes, not reverse):
        total = totals[part] = dh[:count] + grad_y[part]
        inner = total if projection is None else total @ projection
        saved = [held[part] for held in kept]
        dx, dz, direct, new_c = backward_cell(
            mode, inner, None if dc is None else dc[:count], saved
        )
        grad_x[part] = dx
        dh[:count] = dz @ weight if direct is None else dz @ weight + direct
        if dc is not None and new_c is not None:
            dc[:count] = new_c
    results = [grad_x, dh, *([] if dc is None else [dc])]
    return results if projection is None else [*results, totals]


@_recurrence_backward.register_fake
def _(
    grad_y: Tensor,
    grad_h: Tensor,
    grad_c: Tensor | None,
    kept: Sequence[Tensor],
    weight: Tensor,
    projection: Tensor | None,
    batch_sizes: Tensor | None,
    mode: str,
    reverse: bool,
) -> list[Tensor]:
    results = [
        grad_y.new_empty([*grad_y.shape[:-1], weight.shape[0]]),
        grad_y.new_empty(grad_h.shape),
    ]
    results += [] if grad_c is None else [grad_y.new_empty(grad_c.shape)]
    return results if projection is None else [*results, grad_y.new_empty(grad_y.shape)]


recurrence = torch.ops.fx2relax.recurrence.default
recurrence_backward = torch.ops.fx2relax.recurrence_backward.default


def _keep_for_gradient(ctx: Any, inputs: Sequence[Any], output: list[Tensor]) -> None:
    _, _, c0, weight, bias, projection, batch_sizes, ctx.mode, ctx.reverse, keep = inputs
    ctx.states = 2 if c0 is None else 3
    ctx.has_bias = bias is not None
    kept = output[ctx.states :] if keep else []
    ctx.shapes = [(t.shape, t.dtype) for t in output]
    ctx.save_for_backward(weight, projection, batch_sizes, *kept)


def _gradient(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    weight, projection, batch_sizes, *kept = ctx.saved_tensors
    given = [
        weight.new_zeros(shape, dtype=kind) if g is None else g
        for g, (shape, kind) in zip(grads[: ctx.states], ctx.shapes, strict=False)
    ]
    grad_c = given[2].contiguous() if ctx.states == 3 else None
    grad_x, dh, *rest = recurrence_backward(
        given[0].contiguous(),
        given[1].contiguous(),
        grad_c,
        kept,
        weight,
        projection,
        batch_sizes,
        ctx.mode,
        ctx.reverse,
    )
    dz = grad_x
    if ctx.mode == "gru":  # the new gate takes the state's share times the reset gate
        size = weight.shape[1]
        dz = torch.cat([grad_x[..., : 2 * size], grad_x[..., 2 * size :] * kept[0][..., :size]], -1)
    dz = dz.flatten(0, -2)
    grad_weight = dz.t() @ kept[1].flatten(0, -2)
    grad_bias = dz.sum(0) if ctx.has_bias else None
    grad_projection = None
    if projection is not None:
        i, f, g, o = kept[0].chunk(4, -1)
        inner = o * torch.tanh(f * kept[2] + i * g)
        grad_projection = rest[1].flatten(0, -2).t() @ inner.flatten(0, -2)
    dc = rest[0] if ctx.states == 3 else None
    return grad_x, dh, dc, grad_weight, grad_bias, grad_projection, None, None, None, None


_recurrence.register_autograd(_gradient, setup_context=_keep_for_gradient)


# -- ATen's recurrent layers in these terms --------------------------------------------------


def _layers(
    mode: str,
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: Tensor | None = None,
) -> list[Tensor]:
    """Stacked layers over (time, batch, features) or packed input; the outputs and last states."""
    directions = 2 if bidirectional else 1
    projected = c0 is not None and h0.shape[-1] != c0.shape[-1]
    group = 2 + 2 * has_biases + projected
    library = (
        batch_sizes is None
        and not _learns(x, h0, c0, *params)
        and not (train and dropout)
        and recurrent_library.takes(x, h0, c0, params)
    )
    last: list[list[Tensor]] = []
    for layer in range(num_layers):
        outputs = []
        for k in range(layer * directions, (layer + 1) * directions):
            w_ih, w_hh, *rest = params[k * group : (k + 1) * group]
            b_ih, b_hh = rest[:2] if has_biases else (None, None)
            h, c = h0.select(0, k), None if c0 is None else c0.select(0, k)
            reverse = k % directions == 1
            if library:
                assert c is not None
                weights = w_ih, w_hh
                y, *states = recurrent_library.layer(x, h, c, weights, rest[:2], reverse)
            else:
                y, *states = _direction(
                    mode,
                    F.linear(x, w_ih, b_ih),
                    h,
                    c,
                    w_hh,
                    b_hh,
                    rest[-1] if projected else None,
                    batch_sizes,
                    reverse=reverse,
                )
            outputs.append(y)
            last.append(states)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer < num_layers - 1:
            x = torch.dropout(x, dropout, True)
    return [x, *[torch.stack(states) for states in zip(*last, strict=True)]]


def _direction(mode: str, x: Tensor, *operands: Any, reverse: bool) -> list[Tensor]:
    h0, c0, weight, bias, projection, batch_sizes = operands
    keep = _learns(x, h0, c0, weight, bias, projection)
    x, h0 = x.contiguous(), h0.contiguous()
    c0 = None if c0 is None else c0.contiguous()
    results: list[Tensor] = recurrence(
        x, h0, c0, weight, bias, projection, batch_sizes, mode, reverse, keep
    )
    return results[: 2 if c0 is None else 3]


def _input_kernel(mode: str) -> Callable[..., tuple[Tensor, ...]]:
    def kernel(
        input: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        h0, c0 = hx if mode == "lstm" else (hx, None)
        x = input.transpose(0, 1) if batch_first else input
        if guard_or_false(x.shape[0] == 0):  # as eager says it
            raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
        if _on_gpu(x) and not _learns(x, h0, c0, *params) and not (train and dropout):
            y, *states = recurrent_layers(
                x, h0, c0, params, mode, has_biases, num_layers, bidirectional
            )
        else:
            y, *states = _layers(
                mode, x, h0, c0, params, has_biases, num_layers, dropout, train, bidirectional
            )
        return (y.transpose(0, 1) if batch_first else y, *states)

    return kernel


def _learns(*tensors: Tensor | None) -> bool:
    """Whether somebody may ask for a gradient."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _packed_kernel(mode: str) -> Callable[..., tuple[Tensor, ...]]:
    def kernel(
        data: Tensor,
        batch_sizes: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> tuple[Tensor, ...]:
        h0, c0 = hx if mode == "lstm" else (hx, None)
        settings = (has_biases, num_layers, dropout, train, bidirectional, batch_sizes)
        return tuple(_layers(mode, data, h0, c0, params, *settings))

    return kernel


_KERNELS: dict[Any, Callable[..., Any]] = {
    aten.lstm.input: _input_kernel("lstm"),
    aten.gru.input: _input_kernel("gru"),
    aten.rnn_tanh.input: _input_kernel("tanh"),
    aten.rnn_relu.input: _input_kernel("relu"),
    aten.lstm.data: _packed_kernel("lstm"),
    aten.gru.data: _packed_kernel("gru"),
    aten.rnn_tanh.data: _packed_kernel("tanh"),
    aten.rnn_relu.data: _packed_kernel("relu"),
}
_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)


def _only_fakes() -> bool:
    """Whether the caller wants shapes alone and records nothing of the inside, as Dynamo does."""
    modes, active = torch._C._TorchDispatchModeKey, torch._C._get_dispatch_mode
    recorded = active(modes.PROXY) is not None or active(modes.FUNCTIONAL) is not None
    return not recorded and active(modes.FAKE) is not None


def _or_else(ours: Callable[..., Any], pytorchs: Callable[..., Any]) -> Callable[..., Any]:
    """Ours where layers stay whole, PyTorch's decomposition for everyone else."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # PyTorch's would look at packed input's batch sizes, which Dynamo does not know.
        chosen = ours if is_active() or _only_fakes() else pytorchs
        return chosen(*args, **kwargs)

    return kernel


for _operator, _kernel in _KERNELS.items():
    for _key in _KEYS:
        _operator.py_kernels[_key] = _or_else(_kernel, _operator.py_kernels[_key])
    _operator._dispatch_cache.clear()
