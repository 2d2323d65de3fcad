"""The loss of an unknown alignment (CTC)."""

from __future__ import annotations

from typing import Any

import torch

import fx2relax.alignments  # noqa: F401  defines the operator

from .common import converts, dtype, emit, ndim, relax, reshape, shape, tirx
from .opaque import T, local, loops, opaque, require, wide


@converts(torch.ops.fx2relax.ctc_loss.default)
def ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int,
    zero_infinity: bool,
) -> Any:
    """Sums over the alignments of each sequence, step by step, in logarithms."""
    kind = dtype(log_probs)
    time, batch, labels = shape(log_probs)
    longest = shape(targets)[-1]
    one_row = ndim(targets) == 1

    def body(ins: Any, outs: Any, numbers: list[Any]) -> None:
        probs, target, steps, counts = ins
        loss, table = outs
        time, batch, labels, longest = numbers
        width = wide(longest) * wide(2) + wide(1)
        infinite = tirx.const(float("-inf"), kind)
        first = local("int64")
        first[0] = wide(0)
        with loops([batch]) as (b,):
            require(
                tirx.all(steps[b] >= wide(0), steps[b] <= wide(time)),
                "Expected input_lengths to have value at most the number of time steps",
            )
            held = first[0] + counts[b] <= wide(longest)
            require(tirx.all(counts[b] >= wide(0), held), "Expected targets as target_lengths say")
            if one_row:
                first[0] = first[0] + counts[b]
        if one_row:
            require(first[0] == wide(longest), "Expected targets as target_lengths say")

        with loops([batch], parallel=0) as (b,):
            start, count = local("int64"), local("int64")
            start[0], count[0] = wide(0), wide(2) * counts[b] + wide(1)
            if one_row:
                with loops([b]) as (before,):
                    start[0] = start[0] + counts[before]
            else:
                start[0] = wide(b) * wide(longest)

            def label(s: Any) -> Any:
                # Blanks stand between the labels.
                odd = tirx.floormod(wide(s), wide(2)) == wide(1)
                index = start[0] + tirx.floordiv(wide(s), wide(2))
                return tirx.if_then_else(odd, wide(target[index]), wide(blank))

            def prob(t: Any, s: Any) -> Any:
                return probs[(wide(t) * wide(batch) + wide(b)) * wide(labels) + label(s)]

            def place(t: Any, s: Any) -> Any:
                return (wide(b) * wide(time) + wide(t)) * width + wide(s)

            def log_sum(terms: Any, number: int) -> Any:
                largest = local(kind)
                largest[0] = terms[0]
                for k in range(1, number):
                    largest[0] = tirx.Select(terms[k] > largest[0], terms[k], largest[0])
                nothing = largest[0] == infinite
                largest[0] = tirx.Select(nothing, tirx.const(0, kind), largest[0])
                total = tirx.exp(terms[0] - largest[0])
                for k in range(1, number):
                    total = total + tirx.exp(terms[k] - largest[0])
                return tirx.log(total) + largest[0]

            terms = local(kind, 3)
            with T.If(steps[b] == wide(0)):
                with T.Then():
                    empty = tirx.Select(counts[b] == wide(0), tirx.const(0, kind), -infinite)
                    loss[b] = empty
                with T.Else():
                    with loops([count[0]]) as (s,):
                        begins = wide(s) < wide(2)
                        table[place(0, s)] = tirx.if_then_else(begins, prob(0, s), infinite)
                    with loops([steps[b] - wide(1), count[0]]) as (t, s):
                        terms[0] = table[place(t, s)]
                        terms[1] = tirx.if_then_else(
                            s > wide(0), table[place(t, s - wide(1))], infinite
                        )
                        terms[2] = infinite
                        # TIR reads both sides of `all`.
                        before = tirx.max(s - wide(2), wide(0))
                        skips = tirx.all(s > wide(1), label(before) != label(s))
                        with T.If(skips), T.Then():
                            terms[2] = table[place(t, before)]
                        table[place(t + wide(1), s)] = log_sum(terms, 3) + prob(t + wide(1), s)
                    last = steps[b] - wide(1)
                    terms[0] = table[place(last, count[0] - wide(1))]
                    terms[1] = tirx.if_then_else(
                        counts[b] > wide(0), table[place(last, count[0] - wide(2))], infinite
                    )
                    with T.If(counts[b] > wide(0)):
                        with T.Then():
                            loss[b] = -log_sum(terms, 2)
                        with T.Else():
                            loss[b] = -terms[0]

    inputs = [log_probs, targets, input_lengths, target_lengths]
    flat = emit(
        opaque(
            "ctc_loss",
            body,
            inputs,
            lambda n: [(n[1], kind), (n[1] * n[0] * (n[3] * 2 + 1), kind)],
            [time, batch, labels, longest],
        )
    )
    loss, table = (relax.TupleGetItem(flat, k) for k in range(2))
    return loss, reshape(emit(table), [batch, time, longest * 2 + 1])
