"""One token of two decoders with key-value caches, of the two kinds that are in use.

GPT-2's grows: the past comes in and goes out one token longer, as with transformers' DynamicCache.
Llama's is of a fixed length and written in place at a position, as with its StaticCache.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cases import Built

PAST = 128


class GPT2Layer(nn.Module):
    """Attention to the past and to the token itself, and a GELU MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """`past` is 2 x batch x heads x tokens x size: keys and values."""
        batch, width = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(batch, 3, self.heads, 1, -1).unbind(1)
        past = torch.cat([past, torch.stack([k, v])], dim=3)
        y = F.scaled_dot_product_attention(q, past[0], past[1])
        x = x + self.project(y.reshape(batch, width))
        x = x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))
        return x, past


class GPT2Decode(nn.Module):
    """GPT-2 small, one token."""

    def __init__(self, layers: int = 12, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50257, width)
        self.positions = nn.Embedding(1024, width)
        self.layers = nn.ModuleList(GPT2Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50257, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, token: Tensor, position: Tensor, *pasts: Tensor) -> tuple[Tensor, ...]:
        x = self.tokens(token) + self.positions(position)
        grown = []
        for layer, past in zip(self.layers, pasts, strict=True):
            x, past = layer(x, past)
            grown.append(past)
        return self.head(self.norm(x)), *grown


class LlamaLayer(nn.Module):
    """Grouped queries with rotary positions over a cache of fixed length, and a SwiGLU MLP."""

    keys: Tensor
    values: Tensor

    def __init__(
        self, width: int, heads: int, shared: int, hidden: int, batch: int, length: int
    ) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, shared * self.size, bias=False)
        self.v = nn.Linear(width, shared * self.size, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.register_buffer("keys", torch.randn(batch, shared, length, self.size))
        self.register_buffer("values", torch.randn(batch, shared, length, self.size))

    def forward(
        self, x: Tensor, position: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        batch, width = x.shape
        y = self.norm1(x)
        q = _rotate(self.q(y).view(batch, self.heads, 1, self.size), turn)
        k = _rotate(self.k(y).view(batch, self.shared, 1, self.size), turn)
        v = self.v(y).view(batch, self.shared, 1, self.size)
        # Under autocast products are of bfloat16, and the caches still of float32.
        self.keys.index_copy_(2, position, k.to(self.keys.dtype))
        self.values.index_copy_(2, position, v.to(self.values.dtype))
        y = F.scaled_dot_product_attention(
            q, self.keys, self.values, attn_mask=mask, enable_gqa=True
        )
        x = x + self.project(y.reshape(batch, width))
        y = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


def _rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding, halves apart as in Llama."""
    cos, sin = turn
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class LlamaDecode(nn.Module):
    """A Llama of 125 million weights, one token."""

    frequencies: Tensor

    def __init__(
        self,
        batch: int,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        shared: int = 4,
        hidden: int = 2048,
        length: int = 2 * PAST,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32000, width)
        self.layers = nn.ModuleList(
            LlamaLayer(width, heads, shared, hidden, batch, length) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, 32000, bias=False)
        size = width // heads
        steps = torch.arange(0, size, 2) / size
        self.register_buffer("frequencies", torch.exp(-math.log(10000.0) * steps))
        self.length = length

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        """`token` is of the batch's size, `position` of one element."""
        angles = (position[:, None] * self.frequencies).repeat(1, 2)
        turn = angles.cos(), angles.sin()
        mask = torch.arange(self.length, device=token.device)[None] <= position[:, None]
        x = self.tokens(token)
        for layer in self.layers:
            x = layer(x, position, turn, mask)
        out: Tensor = self.head(self.norm(x))
        return out


def gpt2(batch: int) -> Built:
    model = GPT2Decode()
    pasts = [torch.randn(2, batch, 12, PAST, 64) for _ in model.layers]
    return model.eval(), (torch.randint(50257, (batch,)), torch.tensor([PAST]), *pasts)


def llama(batch: int) -> Built:
    return LlamaDecode(batch).eval(), (torch.randint(32000, (batch,)), torch.tensor([PAST]))


def llama_long(batch: int) -> Built:
    """The same with a cache of 8192 positions, in its middle."""
    model = LlamaDecode(batch, length=8192).eval()
    return model, (torch.randint(32000, (batch,)), torch.tensor([4096]))
