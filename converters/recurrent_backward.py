"""The gradient of one direction of a recurrent layer, as one kernel over its time steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fx2relax.recurrent import recurrence_backward

from .common import compute_dtype, converts, dtype, emit, product, relax, reshape, shape, tirx
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


class _Gradient:
    """The arithmetic of one row at one step, in the layer's own dtype or float32."""

    def __init__(self, mode: str, size: int, kind: str, kept: Sequence[Any]) -> None:
        self.mode, self.size, self.kind, self.wide = mode, size, kind, compute_dtype(kind)
        self.gates, self.state = kept[:2]
        self.cells = kept[2] if mode == "lstm" else None

    def read(self, buffer: Any, at: Any) -> Any:
        return buffer[at] if self.wide == self.kind else tirx.Cast(self.wide, buffer[at])

    def narrowed(self, value: Any) -> Any:
        return value if self.wide == self.kind else tirx.Cast(self.kind, value)

    def run(self, place: Any, dz: Any, z_row: Any, dh: Any, h_row: Any, dc: Any, row: Any) -> None:
        """Leave the gates' gradients in `dz` and the direct share of the state's in `dh`.

        An LSTM reads the gradient of its output in `dh` and changes that of its cell in `dc`.
        """
        n, one = self.size, tirx.const(1, self.wide)

        def gate(k: int, j: Any) -> Any:
            width = 4 * n if self.mode in ("lstm", "gru") else n
            return self.read(self.gates, place * width + k * n + j)

        with vector(n) as j:
            at, g = z_row + j, h_row + j
            if self.mode == "lstm":
                cell = row * n + j
                before = self.read(self.cells, place * n + j)
                # The cell's own tanh, in a place that is written again below.
                dz[at + n] = tirx.tanh(gate(1, j) * before + gate(0, j) * gate(2, j))
                dz[at + 3 * n] = dh[g] * dz[at + n] * gate(3, j) * (one - gate(3, j))
                dc[cell] = dc[cell] + dh[g] * gate(3, j) * (one - dz[at + n] * dz[at + n])
                dz[at + n] = dc[cell] * before * gate(1, j) * (one - gate(1, j))
                dz[at] = dc[cell] * gate(2, j) * gate(0, j) * (one - gate(0, j))
                dz[at + 2 * n] = dc[cell] * gate(0, j) * (one - gate(2, j) * gate(2, j))
                dc[cell] = dc[cell] * gate(1, j)
            elif self.mode == "gru":
                change = self.read(self.state, place * n + j) - gate(2, j)
                dz[at + n] = dh[g] * change * gate(1, j) * (one - gate(1, j))
                dz[at + 2 * n] = dh[g] * (one - gate(1, j)) * (one - gate(2, j) * gate(2, j))
                dz[at] = dz[at + 2 * n] * gate(3, j) * gate(0, j) * (one - gate(0, j))
                dh[g] = dh[g] * gate(1, j)
            elif self.mode == "tanh":
                dz[at] = dh[g] * (one - gate(0, j) * gate(0, j))
            else:
                zero = tirx.const(0, self.wide)
                dz[at] = tirx.Select(gate(0, j) <= zero, zero, dh[g])


@converts(recurrence_backward)
def recurrent_layer_backward(
    grad_y: Any,
    grad_h: Any,
    grad_c: Any,
    kept: Sequence[Any],
    weight: Any,
    projection: Any,
    batch_sizes: Any,
    mode: str,
    reverse: bool,
) -> tuple[Any, ...]:
    """Back through all time steps; sums in float32 at least."""
    kind = dtype(grad_y)
    wide_kind = compute_dtype(kind)
    gates, state = static(shape(weight))
    size = gates // {"lstm": 4, "gru": 3}.get(mode, 1)
    lead = shape(grad_y)[:-1]
    total, batch = product(lead), shape(grad_h)[0]
    number = lead[0] if batch_sizes is None else shape(batch_sizes)[0]
    rows, width = row_block(batch), lanes(wide_kind)
    stride, panels = padded(state, width), padded(state, width) // width
    o_stride, o_panels = padded(size, width), padded(size, width) // width
    lstm, projected = mode == "lstm", projection is not None
    by_rows = projected or runs_by_rows(batch, gates, state, wide_kind)
    shared = None if is_one_block(batch) else 0
    packing = packing_of(batch_sizes)

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        steps_, batch_, total_ = numbers
        given, results = iter(ins), iter(outs)
        dy, last, right = next(given), next(given), next(given)
        last_c = next(given) if lstm else None
        p_right = next(given) if projected else None
        cell = _Gradient(mode, size, kind, [next(given) for _ in range(3 if lstm else 2)])
        steps = Steps(steps_, batch_, list(given), not reverse)
        dx, first = next(results), next(results)
        first_c = next(results) if lstm else None
        totals = next(results) if projected else None
        dh, dz, share = next(results), next(results), next(results)
        dc = next(results) if lstm else None
        inner = next(results) if projected else None
        blocks = tirx.floordiv(batch_ + (rows - 1), rows)
        steps.check(total_)

        def states(row: Any) -> list[tuple[Any, Any, int]]:
            found = [(dh, row * state, state)]
            return [*found, (dc, row * size, size)] if lstm else found

        def load(row: Any) -> None:
            for (held, at, n), source in zip(states(row), (last, last_c), strict=False):
                with T.If(row < batch_):
                    with T.Then(), loops([n]) as (j,):
                        held[at + j] = cell.read(source, row * n + j)
                    with T.Else(), loops([n]) as (j,):
                        held[at + j] = tirx.const(0, wide_kind)
            with loops([gates]) as (j,):  # rows that a step does not have are multiplied too
                dz[row * gates + j] = tirx.const(0, wide_kind)

        def unload(row: Any) -> None:
            with T.If(row < batch_), T.Then():
                for (held, at, n), out in zip(states(row), (first, first_c), strict=False):
                    with loops([n]) as (j,):
                        out[row * n + j] = cell.narrowed(held[at + j])

        def collect(row: Any, place: Any) -> None:
            with vector(state) as j:
                at = row * state + j
                dh[at] = dh[at] + cell.read(dy, place * state + j)
            if totals is not None:
                with vector(state) as j:
                    totals[place * state + j] = cell.narrowed(dh[row * state + j])

        def differentiate(row: Any, place: Any) -> None:
            source, at = (inner, row * o_stride) if projected else (dh, row * state)
            cell.run(place, dz, row * gates, source, at, dc, row)
            with vector(gates) as j:
                dx[place * gates + j] = cell.narrowed(dz[row * gates + j])
            if mode == "gru":
                with vector(size) as j:
                    reset = cell.read(cell.gates, place * 4 * size + j)
                    at = row * gates + 2 * size + j
                    dz[at] = dz[at] * reset

        def pass_on(row: Any, place: Any) -> None:
            with vector(state) as j:
                at = row * state + j
                value = share[row * stride + j]
                dh[at] = dh[at] + value if mode == "gru" else value

        def product_of(base: Any, panel: Any) -> None:
            panel_product(dz, right, share, base, panel, rows, gates, stride)

        if by_rows:
            with loops([blocks], parallel=0) as (block,):
                base = block * rows
                with loops([rows]) as (r,):
                    load(base + r)
                with loops([steps_]) as (s,), T.If(base < steps.at(s)[1]), T.Then():
                    steps.active(s, base, rows, collect)
                    if projected:
                        with loops([o_panels]) as (panel,):
                            panel_product(dh, p_right, inner, base, panel, rows, state, o_stride)
                    steps.active(s, base, rows, differentiate)
                    with loops([panels]) as (panel,):
                        product_of(base, panel)
                    steps.active(s, base, rows, pass_on)
                with loops([rows]) as (r,):
                    unload(base + r)
            return
        with loops([blocks * rows]) as (row,):
            load(row)
        with loops([steps_]) as (s,):
            with loops([blocks], parallel=shared) as (block,):
                steps.active(s, block * rows, rows, collect)
                steps.active(s, block * rows, rows, differentiate)
            with (
                loops([panels, blocks], parallel=0) as (panel, block),
                T.If(block * rows < steps.at(s)[1]),
                T.Then(),
            ):
                product_of(block * rows, panel)
            with loops([blocks], parallel=shared) as (block,):
                steps.active(s, block * rows, rows, pass_on)
        with loops([batch_]) as (row,):
            unload(row)

    def outputs(numbers: list[Any]) -> list[tuple[Any, str]]:
        _, batch_, total_ = numbers
        every = padded(batch_, rows)
        found = [(total_ * gates, kind), (batch_ * state, kind)]
        found += [(batch_ * size, kind)] if lstm else []
        found += [(total_ * state, kind)] if projected else []
        found += [(every * n, wide_kind) for n in (state, gates, stride)]
        found += [(every * size, wide_kind)] if lstm else []
        found += [(every * o_stride, wide_kind)] if projected else []
        return found

    inputs = [grad_y, grad_h, packed(weight, transposed=False)]
    inputs += [grad_c] if lstm else []
    inputs += [packed(projection, transposed=False)] if projected else []
    numbers = [number, batch, total]
    found = emit(opaque(f"{mode}_backward", body, [*inputs, *kept, *packing], outputs, numbers))
    sizes = [[*lead, gates], [batch, state], *([[batch, size]] if lstm else [])]
    sizes += [[*lead, state]] if projected else []
    return tuple(reshape(relax.TupleGetItem(found, i), s) for i, s in enumerate(sizes))
