"""A small transformer for several processes, its training, and how two trainings are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH, HEADS, LENGTH, ROWS = 40, 32, 4, 8, 4
STEPS = 4


class Block(nn.Module):
    """Attention and a feed-forward part; `HEADS` or as many as the projections have columns for.

    Args:
        checkpointed: whether the feed-forward part is computed again for its gradients.
    """

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.checkpointed = checkpointed

    def attend(self, x: Tensor) -> Tensor:
        """Causal attention, over as many heads as there are."""
        heads = [p(x).unflatten(-1, (-1, WIDTH // HEADS)) for p in (self.q, self.k, self.v)]
        q, k, v = (h.transpose(1, 2) for h in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def feed(self, x: Tensor) -> Tensor:
        """The feed-forward part."""
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        fed = self.norm2(x)
        if self.checkpointed:
            return x + checkpoint(self.feed, fed, use_reentrant=False)
        return x + self.feed(fed)


class Transformer(nn.Module):
    """Words in, a score for each next word out.

    Args:
        checkpointed: see `Block`.
        spare: adds a layer that only every other call uses.
        layers: how many blocks.
    """

    def __init__(self, checkpointed: bool = False, spare: bool = False, layers: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(checkpointed) for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.spare = nn.Linear(WIDTH, WIDTH) if spare else None

    def forward(self, words: Tensor, with_spare: bool = False) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        if with_spare and self.spare is not None:
            x = x + self.spare(x)
        return self.head(self.norm(x))


class Normalized(nn.Module):
    """Layers with running statistics, which differ between processes until they are broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 24), nn.Linear(24, 5)
        self.norm = nn.BatchNorm1d(24)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.norm(self.first(x))))


def seeded(build: Callable[[], nn.Module], device: str = "cpu") -> nn.Module:
    """A model of the same weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return build().to(device)


def batches(rank: int, device: str = "cpu") -> list[Tensor]:
    """Words for each step; another rank has others."""
    generator = torch.Generator().manual_seed(100 + rank)
    size = (STEPS, ROWS, LENGTH + 1)
    return list(torch.randint(WORDS, size, generator=generator).to(device))


def next_word(model: Callable[..., Tensor], words: Tensor, **given: Any) -> Tensor:
    """The loss: each word from those before it."""
    scores = model(words[:, :-1], **given)
    return F.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten())


Step = Callable[[nn.Module, Tensor, int], Tensor]


def plain(model: nn.Module, words: Tensor, step: int) -> Tensor:
    """One batch, forth and back."""
    loss = next_word(model, words)
    loss.backward()
    return loss


def train(
    model: nn.Module,
    data: Iterable[Tensor],
    step: Step = plain,
    *,
    clip: float | None = None,
    foreach: bool | None = None,
) -> tuple[list[float], list[Tensor]]:
    """Train a model.

    Args:
        model: wrapped and compiled.
        data: a batch for each step.
        step: computes the gradients of a batch, and returns the loss.
        clip: to what norm the gradients are cut.
        foreach: whether the optimiser takes many weights at a time.

    Returns:
        the losses and norms of the gradients; then weights, buffers and momenta.
    """
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=foreach)
    told = []
    for number, batch in enumerate(data):
        optimiser.zero_grad()
        told.append(step(model, batch, number).item())
        if clip is not None:
            told.append(float(local(nn.utils.clip_grad_norm_(model.parameters(), clip))))
        optimiser.step()
    momenta = [
        optimiser.state[p]["momentum_buffer"] for p in model.parameters() if p in optimiser.state
    ]
    return told, [local(t).detach().clone() for t in (*tensors(model), *momenta)]


def tensors(model: nn.Module) -> list[Tensor]:
    """Weights and buffers."""
    return [*model.parameters(), *model.buffers()]


def local(tensor: Tensor) -> Tensor:
    """A tensor, whole if it was a sum that no process had made; the own part of a shared one."""
    if not isinstance(tensor, DTensor):
        return tensor
    partial = any(placement.is_partial() for placement in tensor.placements)
    return tensor.full_tensor() if partial else tensor.to_local()


def same(ours: tuple[list[float], list[Tensor]], eager: tuple[list[float], list[Tensor]]) -> None:
    """Assert that two trainings of one model came to the same.

    Raises:
        AssertionError: they did not, or there was nothing to compare.
    """
    assert len(ours[0]) == len(eager[0]) > 1
    assert abs(eager[0][0] - eager[0][-1]) > 1e-3, "steps that do nothing compare nothing"
    for a, b in zip(ours[0], eager[0], strict=True):
        assert abs(a - b) <= 1e-4 * abs(b), f"losses {ours[0]}, eager {eager[0]}"
    for place, (a, b) in enumerate(zip(ours[1], eager[1], strict=True)):
        assert a.shape == b.shape
        apart = torch.linalg.vector_norm(a.double() - b.double())
        norm = torch.linalg.vector_norm(b.double())
        # Not one by one: some are next to nothing.
        assert apart <= 1e-4 * norm + 1e-6, f"tensor {place}: {apart:.3g} apart, of {norm:.3g}"
