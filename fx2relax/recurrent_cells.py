"""One time step of a recurrent layer and its gradient, in PyTorch: what a kernel has to equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def saved_widths(mode: str, weight: Tensor, h0: Tensor, c0: Tensor | None) -> list[Any]:
    """The last sizes of what a layer keeps for its gradient; see `recurrent.recurrence`."""
    # A GRU also keeps the state's share of its new gate.
    gates = weight.shape[0] // 3 * 4 if mode == "gru" else weight.shape[0]
    return [gates, h0.shape[1], *([] if c0 is None else [c0.shape[1]])]


def forward_cell(
    mode: str, x: Tensor, z: Tensor, h: Tensor, c: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The next state, the next cell's state and the gates, from both shares of the gates."""
    if mode == "lstm":
        assert c is not None
        a, b, g, o = (x + z).chunk(4, -1)
        i, f, g, o = torch.sigmoid(a), torch.sigmoid(b), torch.tanh(g), torch.sigmoid(o)
        c = f * c + i * g
        return o * torch.tanh(c), c, torch.cat([i, f, g, o], -1)
    if mode == "gru":
        (xr, xu, xn), (zr, zu, zn) = x.chunk(3, -1), z.chunk(3, -1)
        r, u = torch.sigmoid(xr + zr), torch.sigmoid(xu + zu)
        n = torch.tanh(xn + r * zn)
        return (h - n) * u + n, None, torch.cat([r, u, n, zn], -1)
    y = torch.tanh(x + z) if mode == "tanh" else torch.relu(x + z)
    return y, None, y


def backward_cell(
    mode: str, dh: Tensor, dc: Tensor | None, saved: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of both shares of the gates, of the state directly, and of the cell's state."""
    gates, h, *rest = saved
    if mode == "lstm":
        assert dc is not None
        (i, f, g, o), before = gates.chunk(4, -1), rest[0]
        t = torch.tanh(f * before + i * g)
        dc = dc + dh * o * (1 - t * t)
        di, df, do = dc * g * i * (1 - i), dc * before * f * (1 - f), dh * t * o * (1 - o)
        dx = torch.cat([di, df, dc * i * (1 - g * g), do], -1)
        return dx, dx, None, dc * f
    if mode == "gru":
        r, u, n, zn = gates.chunk(4, -1)
        dn = dh * (1 - u) * (1 - n * n)
        du, dr = dh * (h - n) * u * (1 - u), dn * zn * r * (1 - r)
        return torch.cat([dr, du, dn], -1), torch.cat([dr, du, dn * r], -1), dh * u, None
    dx = dh * (1 - gates * gates) if mode == "tanh" else torch.where(gates <= 0, 0, dh)
    return dx, dx, None, None
