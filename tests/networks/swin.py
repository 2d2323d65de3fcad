"""Swin-Tiny (Liu et al., 2021): shifted windows and relative position bias."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class WindowAttention(nn.Module):
    """Self-attention within windows, rolled by half a window in every second block."""

    relative: Tensor

    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.bias_table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) * 0.2)
        grid = torch.stack(
            torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
        ).flatten(1)
        offset = (grid[:, :, None] - grid[:, None, :]) + window - 1
        self.register_buffer("relative", (offset[0] * (2 * window - 1) + offset[1]).flatten())

    def bias(self) -> Tensor:
        area = self.window**2
        return self.bias_table[self.relative].view(area, area, -1).permute(2, 0, 1).unsqueeze(0)

    def mask(self, x: Tensor, height: int, width: int, shift: tuple[int, int]) -> Tensor:
        """-100 between positions that the roll brought together from opposite edges."""
        w = self.window
        regions = x.new_zeros((height, width))
        count = 0
        rows = ((0, -w), (-w, -shift[0]), (-shift[0], None))
        columns = ((0, -w), (-w, -shift[1]), (-shift[1], None))
        for top, bottom in rows:
            for left, right in columns:
                regions[top:bottom, left:right] = count
                count += 1
        regions = regions.view(height // w, w, width // w, w).permute(0, 2, 1, 3)
        regions = regions.reshape(-1, w * w)
        apart = regions.unsqueeze(1) - regions.unsqueeze(2)
        return apart.masked_fill(apart != 0, -100.0).masked_fill(apart == 0, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, columns, channels = x.shape
        w, area = self.window, self.window**2
        x = F.pad(x, (0, 0, 0, -columns % w, 0, -rows % w))
        height, width = x.shape[1:3]
        # A window that covers the whole side has nowhere to shift to.
        shift = (0 if w >= height else self.shift, 0 if w >= width else self.shift)
        if sum(shift) > 0:
            x = torch.roll(x, (-shift[0], -shift[1]), (1, 2))
        windows = (height // w) * (width // w)
        x = x.view(batch, height // w, w, width // w, w, channels)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(batch * windows, area, channels)
        qkv = self.qkv(x).reshape(batch * windows, area, 3, self.heads, channels // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * (channels // self.heads) ** -0.5) @ k.transpose(-2, -1) + self.bias()
        if sum(shift) > 0:
            mask = self.mask(x, height, width, shift).unsqueeze(1).unsqueeze(0)
            scores = scores.view(batch, windows, self.heads, area, area) + mask
            scores = scores.view(-1, self.heads, area, area)
        x = (F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(-1, area, channels)
        x = self.project(x).view(batch, height // w, width // w, w, w, channels)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(batch, height, width, channels)
        if sum(shift) > 0:
            x = torch.roll(x, shift, (1, 2))
        return x[:, :rows, :columns, :].contiguous()


class SwinBlock(nn.Module):
    """Window attention and an MLP, each after a LayerNorm."""

    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = WindowAttention(width, heads, window, shift)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    """Halve both sides, double the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = x.shape[1:3]
        x = F.pad(x, (0, 0, 0, columns % 2, 0, rows % 2))
        parts = (x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2])
        return self.reduction(self.norm(torch.cat(parts, -1)))


class SwinTiny(nn.Module):
    """Swin-Tiny with torchvision's shapes."""

    def __init__(self, classes: int = 1000, window: int = 7) -> None:
        super().__init__()
        width = 96
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.patch_norm = nn.LayerNorm(width)
        layers: list[nn.Module] = []
        for stage, (depth, heads) in enumerate(zip((2, 2, 6, 2), (3, 6, 12, 24), strict=True)):
            if stage:
                layers.append(PatchMerging(width))
                width *= 2
            layers += [
                SwinBlock(width, heads, window, window // 2 if i % 2 else 0) for i in range(depth)
            ]
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_norm(self.patches(x).permute(0, 2, 3, 1))
        return self.head(self.norm(self.layers(x)).mean((1, 2)))
