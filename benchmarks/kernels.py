"""Single kernels, with the shapes that a small transformer or an image network gives them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cases import Built


class Kernel(nn.Module):
    """A function as a module without weights."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def _built(function: Callable[..., Tensor], *args: Tensor) -> Built:
    return Kernel(function).eval(), args


def gelu_chain(batch: int) -> Built:
    """A product and a sum through GELU, 512 x 1024."""
    return _built(lambda x, y, z: F.gelu(x * y + z), *(torch.randn(512, 1024) for _ in range(3)))


def softmax(batch: int) -> Built:
    """The last axis of attention scores, 96 x 128 x 128."""
    return _built(lambda x: F.softmax(x, -1), torch.randn(96, 128, 128))


def layer_norm(batch: int) -> Built:
    args = torch.randn(1024, 768), torch.rand(768) + 0.5, torch.randn(768)
    return _built(lambda x, w, b: F.layer_norm(x, (768,), w, b), *args)


def rms_norm(batch: int) -> Built:
    args = torch.randn(1024, 768), torch.rand(768) + 0.5
    return _built(lambda x, w: F.rms_norm(x, (768,), w, 1e-6), *args)


def sum_last(batch: int) -> Built:
    return _built(lambda x: x.sum(-1), torch.randn(1024, 1024))


def sum_outer(batch: int) -> Built:
    return _built(lambda x: x.sum(0), torch.randn(1024, 1024))


def sum_all(batch: int) -> Built:
    # Of positive numbers: a sum that cancels says nothing about the error of its terms.
    return _built(lambda x: x.sum(), torch.rand(1024, 1024))


def amax_last(batch: int) -> Built:
    return _built(lambda x: x.amax(-1), torch.randn(1024, 1024))


def transpose(batch: int) -> Built:
    return _built(lambda x: x.t().contiguous(), torch.randn(1024, 1024))


def transpose_heads(batch: int) -> Built:
    """Tokens x heads to heads x tokens, as before attention."""
    return _built(lambda x: x.transpose(1, 2).contiguous(), torch.randn(8, 128, 12, 64))


def nchw_to_nhwc(batch: int) -> Built:
    return _built(lambda x: x.permute(0, 2, 3, 1).contiguous(), torch.randn(8, 64, 56, 56))


def gather(batch: int) -> Built:
    args = torch.randn(1024, 1024), torch.randint(1024, (1024, 256))
    return _built(lambda x, i: x.gather(1, i), *args)


def embedding(batch: int) -> Built:
    args = torch.randint(30000, (1024,)), torch.randn(30000, 256)
    return _built(lambda i, w: F.embedding(i, w), *args)


def cumsum(batch: int) -> Built:
    return _built(lambda x: x.cumsum(-1), torch.rand(512, 1024))


def argmax(batch: int) -> Built:
    return _built(lambda x: x.argmax(-1), torch.randn(1024, 1024))


def add(batch: int) -> Built:
    return _built(lambda x, y: x + y, torch.randn(1024, 1024), torch.randn(1024, 1024))


def broadcast(batch: int) -> Built:
    """A row, a column and a matrix."""
    args = torch.randn(1024, 1024), torch.randn(1024), torch.randn(1024, 1)
    return _built(lambda x, row, column: (x * row + column).relu(), *args)


def add_16(batch: int) -> Built:
    """What a call costs: 16 elements are no work."""
    return _built(lambda x: x + 1, torch.randn(16))


def prime(batch: int) -> Built:
    return _built(lambda x: x * 3 - 2, torch.randn(16))
