"""From a seed to a program that eager runs."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from .grammar import Line, line
from .program import SIZES, Input, Program, variables

_DTYPES = (
    [torch.float32] * 8
    + [torch.int64] * 3
    + [torch.float64, torch.int32, torch.bool, torch.uint8, torch.int16]
    + [torch.float16, torch.bfloat16]
)
_SHAPES: tuple[tuple[str | int, ...], ...] = (
    ("a", "b"), ("a", "b", "c"), ("b", "c"), ("c",), ("a", 1, "c"), (1, "b"), ("b", "b"),
    ("a", "b", "b"), ("a", "c"), (), ("a", 1), (1,), ("b", "a"), ("a", "b", "c", 2),
)  # fmt: skip
_LAYOUTS = ("dense",) * 5 + ("transposed", "sliced", "offset", "expanded")


def generate(seed: int, length: int = 12, dynamic: bool = False) -> Program:
    """The program of a seed.

    Args:
        seed: any number; the same one gives the same program.
        length: how many lines it has at most.
        dynamic: whether it runs at each of `SIZES`, or at the first alone.
    """
    rng = random.Random(seed)
    sizes = SIZES if dynamic else SIZES[:1]
    inputs = [
        Input(rng.choice(_SHAPES), rng.choice(_DTYPES), rng.choice(_LAYOUTS))
        for _ in range(rng.randint(1, 4))
    ]
    program = Program(seed, inputs, grad=rng.random() < 0.6)
    program.exact = dict.fromkeys(program.names, True)
    wanted = rng.randint(length // 2, length)
    for _ in range(8 * wanted):
        if len(program.lines) == wanted:
            break
        _grow(program, rng, sizes)
    _choose_outputs(program, rng)
    if program.grad and not all(_has_gradient(program, s) for s in sizes):
        program.grad = False
    return program


def _grow(program: Program, rng: random.Random, sizes: Sequence[dict[str, int]]) -> None:
    known = variables(program, program.lines, sizes[0])
    assert known is not None
    fresh = f"v{len(program.lines)}"
    added = line(rng, known, program.exact, fresh)
    if added is None:
        return
    lines = [*program.lines, added.text]
    after = [variables(program, lines, s) for s in sizes]
    if any(found is None for found in after):
        return
    program.lines = lines
    _note_exactness(program, added, fresh, after[0] or {})


def _note_exactness(
    program: Program, added: Line, fresh: str, after: dict[str, torch.Tensor]
) -> None:
    """Whatever shares memory with what a line writes is as exact as the line."""
    whole = not after[added.writes or fresh].is_floating_point()
    exact = (added.exact or whole) and all(program.exact[name] for name in added.reads)
    if added.writes is None:
        program.exact[fresh] = exact
        return
    storage = after[added.writes].untyped_storage().data_ptr()
    for name in list(program.exact):
        if after[name].untyped_storage().data_ptr() == storage:
            program.exact[name] = program.exact[name] and exact


def _choose_outputs(program: Program, rng: random.Random) -> None:
    made = [n for n in program.exact if n.startswith("v")] or program.names
    chosen = [made[-1], *rng.sample(made, min(len(made), rng.randint(0, 3)))]
    if rng.random() < 0.2:
        chosen.append(rng.choice(program.names))
    extra = ("{0}.size(0) if {0}.dim() else 1", "{0}[...]", "[{0}, None]", "{{'k': {0}}}")
    if rng.random() < 0.3:
        chosen.append(rng.choice(extra).format(rng.choice(list(program.exact))))
    program.outputs = list(dict.fromkeys(chosen))


def _has_gradient(program: Program, sizes: dict[str, int]) -> bool:
    """Whether eager's own backward pass runs, and gives numbers."""
    arguments = program.arguments(sizes)
    try:
        roots = [
            t
            for t in torch.utils._pytree.tree_leaves(program.function()(*arguments))
            if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        if not roots:
            return False
        torch.autograd.backward(roots, [torch.ones_like(r) for r in roots])
    except RuntimeError:
        return False
    slopes = [t.grad for t in arguments if t.is_leaf and t.grad is not None]
    return all(
        bool(g.isfinite().all()) and float(g.abs().max() if g.numel() else 0) < 1e5 for g in slopes
    )
