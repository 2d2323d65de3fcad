"""What both sweeps need to compare a compiled function with eager."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


class Heard(logging.Handler):
    """Warnings, as texts: each of ours says what fell back, and why."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one warning."""
        self.texts.append(" ".join(record.getMessage().split())[:600])


def values(outputs: Any, arguments: Any, grad: bool) -> tuple[list[Any], list[Any]]:
    """The tensors among some outputs, detached; with `grad`, the arguments' gradients too.

    The outputs' own gradients are random, the same at each call.
    """
    found = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]
    if grad:
        _backward([t for t in found if t.requires_grad])
    leaves = [t for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)]
    slopes = [t.grad for t in leaves if t.is_leaf and t.grad is not None]
    return [t.detach() for t in found], slopes


def _backward(roots: Sequence[torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    grads = [
        torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in roots
    ]
    if roots:
        torch.autograd.backward(list(roots), grads)
