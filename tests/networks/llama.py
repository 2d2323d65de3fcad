"""A Llama with a cache that its caller holds: one function for the prompt, one for a token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Cache = list[tuple[Tensor, Tensor]]


class Attention(nn.Module):
    """Grouped queries with rotary positions."""

    def __init__(self, width: int, heads: int, shared: int) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, shared * self.size, bias=False)
        self.v = nn.Linear(width, shared * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], past: tuple[Tensor, Tensor] | None):
        batch, length, width = x.shape
        q = rotated(self.q(x).view(batch, length, self.heads, self.size), turn).transpose(1, 2)
        k = rotated(self.k(x).view(batch, length, self.shared, self.size), turn).transpose(1, 2)
        v = self.v(x).view(batch, length, self.shared, self.size).transpose(1, 2)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=past is None, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(batch, length, width)), (k, v)


class Mlp(nn.Module):
    """SwiGLU, the gate and the projection beside it as one product."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        both = F.linear(x, torch.cat([self.gate.weight, self.up.weight]))
        gate, up = both.chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, shared: int, hidden: int) -> None:
        super().__init__()
        self.before_attention = nn.RMSNorm(width, eps=1e-5)
        self.before_mlp = nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width, heads, shared)
        self.mlp = Mlp(width, hidden)

    def forward(self, x, turn, past):
        y, cache = self.attention(self.before_attention(x), turn, past)
        x = x + y
        return x + self.mlp(self.before_mlp(x)), cache


class Llama(nn.Module):
    """RMSNorm, rotary positions, grouped queries, SwiGLU."""

    frequencies: Tensor

    def __init__(
        self,
        layers: int = 2,
        width: int = 64,
        heads: int = 4,
        shared: int = 2,
        hidden: int = 176,
        words: int = 211,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, heads, shared, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, words, bias=False)
        size = width // heads
        frequencies = 10000.0 ** (-torch.arange(0, size, 2) / size)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def prefill(self, ids: Tensor) -> tuple[Tensor, Cache]:
        """The logits behind a prompt, and its cache."""
        return self._run(ids, torch.arange(ids.shape[1]), None)

    def decode(self, ids: Tensor, past: Cache) -> tuple[Tensor, Cache]:
        """The logits behind one more token, and the longer cache."""
        start = past[0][0].shape[2]
        return self._run(ids, torch.arange(start, start + 1), past)

    def _run(self, ids: Tensor, positions: Tensor, past: Cache | None) -> tuple[Tensor, Cache]:
        angles = positions[:, None] * self.frequencies
        turn = angles.cos()[:, None], angles.sin()[:, None]
        x = self.tokens(ids)
        caches = []
        for number, layer in enumerate(self.layers):
            x, cache = layer(x, turn, None if past is None else past[number])
            caches.append(cache)
        return self.head(self.norm(x[:, -1])), caches


def rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Pairs of halves, turned by their position's angles; `x` is (batch, length, head, size)."""
    cos, sin = turn
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def specs(model: Llama) -> dict[str, dict[str, object]]:
    """What `prefill` and `decode` take, batch and lengths left open."""
    from fx2relax import Tensor as Spec

    attention = model.layers[0].attention
    held = Spec(("batch", attention.shared, "past", attention.size))
    return {
        "prefill": {"ids": Spec(("batch", "length"), "int64")},
        "decode": {
            "ids": Spec(("batch", 1), "int64"),
            "past": [(held, held) for _ in model.layers],
        },
    }


@torch.no_grad()
def greedy(prefill, decode, ids, count):
    """The tokens that the two functions choose behind a prompt."""
    logits, cache = prefill(ids)
    found = []
    for _ in range(count):
        token = logits.argmax(-1)[:, None]
        found.append(token)
        logits, cache = decode(token, cache)
    return found
