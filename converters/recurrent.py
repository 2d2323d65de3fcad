"""One direction of a recurrent layer as one kernel: all its time steps, the state in cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fx2relax.recurrent import recurrence

from .common import (
    Unsupported,
    compute_dtype,
    converts,
    dtype,
    emit,
    op,
    product,
    relax,
    reshape,
    shape,
    tirx,
)
from .opaque import T, loops, opaque
from .recurrent_kernels import (
    Steps,
    is_one_block,
    lanes,
    packed,
    packing_of,
    padded,
    panel_product,
    row_block,
    runs_by_rows,
    static,
    vector,
)

aten = torch.ops.aten


class _Cell:
    """The arithmetic of one row at one step, from the state's share of the gates in `z`."""

    def __init__(self, mode: str, size: int, kind: str, z: Any, x: Any, bias: Any) -> None:
        self.mode, self.size, self.kind = mode, size, kind
        self.z, self.x, self.bias = z, x, bias
        self.wide = compute_dtype(kind)

    def widened(self, value: Any) -> Any:
        return value if self.wide == self.kind else tirx.Cast(self.wide, value)

    def rounded(self, value: Any) -> Any:
        """As it is after a store in the layer's own dtype."""
        if self.wide == self.kind:
            return value
        return tirx.Cast(self.wide, tirx.Cast(self.kind, value))

    def narrowed(self, value: Any) -> Any:
        return value if self.wide == self.kind else tirx.Cast(self.kind, value)

    def share(self, z_row: Any, gate: int, j: Any) -> Any:
        """The state's share of a gate, with its bias."""
        value = self.z[z_row + gate * self.size + j]
        return value if self.bias is None else value + self.widened(self.bias[gate * self.size + j])

    def gate(self, z_row: Any, x_row: Any, gate: int, function: Any) -> None:
        """Replace a gate's share by its value."""
        with vector(self.size) as j:
            at = gate * self.size + j
            value = self.share(z_row, gate, j) + self.widened(self.x[x_row + at])
            self.z[z_row + at] = function(value)

    def run(self, z_row: Any, x_row: Any, h: Any, h_row: Any, c: Any, c_row: Any) -> None:
        """The new state in the row of `h`; for "lstm" the new cell's state in that of `c`."""
        z, n = self.z, self.size
        if self.mode == "lstm":
            for gate, function in enumerate((tirx.sigmoid, tirx.sigmoid, tirx.tanh, tirx.sigmoid)):
                self.gate(z_row, x_row, gate, function)
            with vector(n) as j:
                kept = z[z_row + n + j] * c[c_row + j]
                c[c_row + j] = self.rounded(kept + z[z_row + j] * z[z_row + 2 * n + j])
            with vector(n) as j:
                h[h_row + j] = self.rounded(z[z_row + 3 * n + j] * tirx.tanh(c[c_row + j]))
        elif self.mode == "gru":
            self.gate(z_row, x_row, 0, tirx.sigmoid)
            self.gate(z_row, x_row, 1, tirx.sigmoid)
            with vector(n) as j:  # the fourth gate keeps the state's share of the third
                z[z_row + 3 * n + j] = self.share(z_row, 2, j)
            with vector(n) as j:
                new = self.widened(self.x[x_row + 2 * n + j])
                z[z_row + 2 * n + j] = tirx.tanh(new + z[z_row + j] * z[z_row + 3 * n + j])
            with vector(n) as j:
                new = z[z_row + 2 * n + j]
                h[h_row + j] = self.rounded((h[h_row + j] - new) * z[z_row + n + j] + new)
        else:
            function = tirx.tanh if self.mode == "tanh" else _relu
            self.gate(z_row, x_row, 0, function)
            with vector(n) as j:
                h[h_row + j] = self.rounded(z[z_row + j])


def _relu(x: Any) -> Any:
    return tirx.Select(x <= tirx.const(0, x.ty.dtype), tirx.const(0, x.ty.dtype), x)


@converts(recurrence)
def recurrent_layer(
    x: Any,
    h0: Any,
    c0: Any,
    weight: Any,
    bias: Any,
    projection: Any,
    batch_sizes: Any,
    mode: str,
    reverse: bool,
    keep: bool,
) -> tuple[Any, ...]:
    """All time steps of one direction of one layer; half precision rounds the state each step."""
    kind = dtype(x)
    wide_kind = compute_dtype(kind)
    gates, state = static(shape(weight))
    size = gates // {"lstm": 4, "gru": 3}.get(mode, 1)
    kept_gates = 4 * size if mode == "gru" else gates
    lead = shape(x)[:-1]
    total, batch = product(lead), shape(h0)[0]
    number = lead[0] if batch_sizes is None else shape(batch_sizes)[0]
    rows = row_block(batch)
    width = lanes(wide_kind)
    z_stride = padded(max(gates, kept_gates), width)
    panels = padded(gates, width) // width
    projected = projection is not None
    p_stride, p_panels = padded(state, width), padded(state, width) // width
    by_rows = projected or runs_by_rows(batch, gates, state, wide_kind)
    lstm = mode == "lstm"
    shared = None if is_one_block(batch) else 0
    packing = packing_of(batch_sizes)

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        steps_, batch_, total_ = numbers
        given, results = iter(ins), iter(outs)
        data, first, right = next(given), next(given), next(given)
        first_c = next(given) if lstm else None
        b = next(given) if bias is not None else None
        p_right = next(given) if projected else None
        steps = Steps(steps_, batch_, list(given), reverse)
        y, last = next(results), next(results)
        last_c = next(results) if lstm else None
        saved = [next(results) for _ in range(3 if lstm else 2)] if keep else []
        h, z = next(results), next(results)
        c = next(results) if lstm else None
        inner: Any = next(results) if projected else None
        p: Any = next(results) if projected else None
        cell = _Cell(mode, size, kind, z, data, b)
        blocks = tirx.floordiv(batch_ + (rows - 1), rows)
        steps.check(total_)

        def states(row: Any) -> list[tuple[Any, Any, int]]:
            """The buffers of the states, where a row starts in them, and how long it is."""
            found = [(h, row * state, state)]
            return [*found, (c, row * size, size)] if lstm else found

        def load(row: Any) -> None:
            for (held, at, n), source in zip(states(row), (first, first_c), strict=False):
                with T.If(row < batch_):
                    with T.Then(), loops([n]) as (j,):
                        held[at + j] = cell.widened(source[row * n + j])
                    with T.Else(), loops([n]) as (j,):
                        held[at + j] = tirx.const(0, wide_kind)

        def unload(row: Any) -> None:
            with T.If(row < batch_), T.Then():
                for (held, at, n), out in zip(states(row), (last, last_c), strict=False):
                    with loops([n]) as (j,):
                        out[row * n + j] = cell.narrowed(held[at + j])

        def update(row: Any, place: Any) -> None:
            for out, (held, at, n) in zip(saved[1:], states(row), strict=False):
                with vector(n) as j:
                    out[place * n + j] = cell.narrowed(held[at + j])
            target, at = (inner, row * size) if projected else (h, row * state)
            cell.run(row * z_stride, place * gates, target, at, c, row * size)
            if saved:
                with vector(kept_gates) as j:
                    saved[0][place * kept_gates + j] = cell.narrowed(z[row * z_stride + j])

        def finish(row: Any, place: Any) -> None:
            if projected:
                with vector(state) as j:
                    h[row * state + j] = cell.rounded(p[row * p_stride + j])
            with vector(state) as j:
                y[place * state + j] = cell.narrowed(h[row * state + j])

        def gates_of(base: Any, panel: Any) -> None:
            panel_product(h, right, z, base, panel, rows, state, z_stride)

        if by_rows:
            with loops([blocks], parallel=0) as (block,):
                base = block * rows
                with loops([rows]) as (r,):
                    load(base + r)
                with loops([steps_]) as (s,), T.If(base < steps.at(s)[1]), T.Then():
                    with loops([panels]) as (panel,):
                        gates_of(base, panel)
                    steps.active(s, base, rows, update)
                    if projected:
                        with loops([p_panels]) as (panel,):
                            panel_product(inner, p_right, p, base, panel, rows, size, p_stride)
                    steps.active(s, base, rows, finish)
                with loops([rows]) as (r,):
                    unload(base + r)
            return
        # A large weight is read once in a step, by panels, for all rows.
        with loops([blocks * rows]) as (row,):
            load(row)
        with loops([steps_]) as (s,):
            with (
                loops([panels, blocks], parallel=0) as (panel, block),
                T.If(block * rows < steps.at(s)[1]),
                T.Then(),
            ):
                gates_of(block * rows, panel)
            with loops([blocks], parallel=shared) as (block,):
                steps.active(s, block * rows, rows, update)
                steps.active(s, block * rows, rows, finish)
        with loops([batch_]) as (row,):
            unload(row)

    def outputs(numbers: list[Any]) -> list[tuple[Any, str]]:
        _, batch_, total_ = numbers
        every = padded(batch_, rows)
        found = [(total_ * state, kind), (batch_ * state, kind)]
        found += [(batch_ * size, kind)] if lstm else []
        if keep:
            widths = [kept_gates, state, *([size] if lstm else [])]
            found += [(total_ * n, kind) for n in widths]
        found += [(every * state, wide_kind), (every * z_stride, wide_kind)]
        found += [(every * size, wide_kind)] if lstm else []
        if projected:
            found += [(every * size, wide_kind), (every * p_stride, wide_kind)]
        return found

    inputs = [x, h0, packed(weight, transposed=True)]
    inputs += [c0] if lstm else []
    inputs += [] if bias is None else [bias]
    inputs += [packed(projection, transposed=True)] if projected else []
    found = emit(opaque(mode, body, [*inputs, *packing], outputs, [number, batch, total]))
    sizes = [[*lead, state], [batch, state], *([[batch, size]] if lstm else [])]
    if keep:
        sizes += [[*lead, kept_gates], [*lead, state], *([[*lead, size]] if lstm else [])]
    return tuple(reshape(relax.TupleGetItem(found, i), s) for i, s in enumerate(sizes))


@converts(aten.mkldnn_rnn_layer.default)
def mkldnn_rnn_layer(
    input: Any,
    weight0: Any,
    weight1: Any,
    weight2: Any,
    weight3: Any,
    hx_: Any,
    cx_: Any,
    reverse: bool,
    batch_sizes: Sequence[int],
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
    train: bool,
) -> tuple[Any, ...]:
    """One direction of an LSTM layer, as PyTorch's own decomposition writes it for a CPU."""
    if mode != 2 or num_layers != 1 or bidirectional or train or batch_sizes:
        raise Unsupported("a recurrent layer other than one direction of an LSTM")
    x = op.permute_dims(input, [1, 0, 2]) if batch_first else input
    x = op.matmul(x, op.permute_dims(weight0))
    if has_biases:
        x = op.add(x, weight2)
    states = [reshape(s, shape(s)[-2:]) for s in (hx_, cx_)]
    bias = weight3 if has_biases else None
    h0, c0 = states
    settings = (None, None, "lstm", reverse, False)
    y, h, c = recurrent_layer(emit(x), h0, c0, weight1, bias, *settings)
    y = op.permute_dims(y, [1, 0, 2]) if batch_first else y
    workspace = op.zeros(relax.ShapeExpr([0]), "uint8")
    return y, reshape(h, shape(hx_)), reshape(c, shape(cx_)), workspace
